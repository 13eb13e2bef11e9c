"""A torch model as one flat buffer: tensor layout, copies in and out, change detection."""

__all__ = ["adapter", "change_detector", "flat_buffer", "gradient_watch", "model_spec"]
