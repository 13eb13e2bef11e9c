"""Gradients before they are pushed: their sum over several batches, and the scale of GradScaler."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from psworker.model.flat_buffer import local_part


class GradientAccumulation:
    """The sum of the gradients of one update, if several batches make it (`--global-batch`).

    Gradients are weighted by samples. Half-precision gradients are summed in float32.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.clear()

    def clear(self) -> None:
        """Drop the sums."""
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._samples = 0

    def add(self, samples: int) -> None:
        """Add the parameters' gradients to the update. samples: They are the mean over these."""
        for place, parameter in enumerate(self._parameters):
            grad, total = parameter.grad, self._sums[place]
            if grad is not None and total is None:
                exact = torch.promote_types(grad.dtype, torch.float32)
                self._sums[place] = grad.to(exact) * samples
            elif grad is not None and total is not None:
                total.add_(grad, alpha=samples)
        self._samples += samples

    def finish(self, samples: int) -> int:
        """Replace the parameters' gradients by the mean over the whole update.

        samples: The current gradients, the last part of the update, are the mean over these.

        Returns:
            Number of samples of the update.
        """
        if not self._samples:
            return samples
        self.add(samples)
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if total is not None:
                mean = total.div_(self._samples).to(parameter.dtype)
                parameter.grad = mean if parameter.grad is None else parameter.grad.copy_(mean)
        total_samples = self._samples
        self.clear()
        return total_samples


def unscale(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Divide gradients by a scale in place, with the same bits as GradScaler.

    Like GradScaler it refuses half-precision gradients, because a quotient could become 0.
    """
    gradients = [local_part(gradient) for gradient in gradients]
    if any(gradient.dtype is torch.float16 for gradient in gradients):
        raise ValueError("Attempting to unscale FP16 gradients.")  # the text of GradScaler
    for _, group in groupby(sorted(gradients, key=_dtype), _dtype):
        alike = list(group)
        inverse = scale.double().reciprocal().float().to(alike[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, torch.zeros_like(inverse), inverse)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype)
