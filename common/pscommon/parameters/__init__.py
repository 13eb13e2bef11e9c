"""Arrays of a part of the model, the means of gradients and the optimizer's steps on them."""

__all__ = ["finite_values", "means", "optimizer", "partition", "state_images"]
