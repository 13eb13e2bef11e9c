"""What needs a GPU, in one folder that runs on a machine without a package index.

`make gpu-bundle` writes it to build/gpu-bundle: this package, the tests marked `cuda`, wheels of
all dependencies but torch, and run.py. There: `python3 run.py`, with a Python that has torch.
"""
