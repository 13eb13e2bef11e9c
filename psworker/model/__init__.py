"""A torch model as one flat buffer: which tensors there are, where they lie, and how bytes are
copied.
"""
