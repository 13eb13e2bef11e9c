"""The torch optimizers of a job, whose steps run on the servers."""

__all__ = ["optimizer", "optimizer_set", "served_model"]
