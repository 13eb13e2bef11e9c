"""A torch model as one flat buffer: which tensors there are, where they lie, and how bytes are
copied.
"""

__all__ = ["adapter", "flat_buffer", "saving"]
