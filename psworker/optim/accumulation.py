"""Gradients of one update that several batches make (`--global-batch`), added up on this worker."""

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientAccumulation:
    """Sums of gradients, each times its number of samples. What was added in half precision is
    summed in single.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.clear()

    def clear(self) -> None:
        """What was added is dropped."""
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._samples = 0

    def add(self, samples: int) -> None:
        """The gradients in hand, the mean over so many samples, are part of the update."""
        for place, parameter in enumerate(self._parameters):
            grad, total = parameter.grad, self._sums[place]
            if grad is not None and total is None:
                exact = torch.promote_types(grad.dtype, torch.float32)
                self._sums[place] = grad.to(exact) * samples
            elif grad is not None and total is not None:
                total.add_(grad, alpha=samples)
        self._samples += samples

    def finish(self, samples: int) -> int:
        """The gradients in hand are the last part: they become the mean over all. Returns the
        samples of the update.

        With nothing added before they are the update as they are.
        """
        if not self._samples:
            return samples
        self.add(samples)
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if total is not None:
                mean = total.div_(self._samples).to(parameter.dtype)
                parameter.grad = mean if parameter.grad is None else parameter.grad.copy_(mean)
        everything = self._samples
        self.clear()
        return everything
