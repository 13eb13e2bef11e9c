"""Step strategies: how the gradients of a step reach the servers and the new weights come back."""

__all__ = ["overlapped_step", "pipelined_step", "reduced_step", "step"]
