"""Gradients of torch's GradScaler."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


def unscale(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Divide gradients by a scale in place, with the same bits as GradScaler.

    Like GradScaler it refuses half-precision gradients, because a quotient could become 0.
    """
    if any(gradient.dtype is torch.float16 for gradient in gradients):
        raise ValueError("Attempting to unscale FP16 gradients.")  # the text of GradScaler
    for _, group in groupby(sorted(gradients, key=_dtype), _dtype):
        alike = list(group)
        inverse = scale.double().reciprocal().float().to(alike[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, torch.zeros_like(inverse), inverse)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype)
