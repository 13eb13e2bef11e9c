"""Small training scripts to run and to read.

- digits: a CNN.
- charlm: a transformer.
- linear: numpy only.
- resnet: torchvision's ResNet-18 (extra `vision`).
- gpt2: Hugging Face's GPT-2, built from a configuration (extra `transformers`).
- train_distributed.ipynb: a notebook with DistributedTraining (extra `notebook`).
"""
