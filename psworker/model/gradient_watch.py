"""Whether backward has added something to the gradients since a moment.

As in `psworker.model.change_detector`, the tensors themselves tell, or an even sample of many:
backward gives a parameter a new gradient, or adds to the one it has, which increments torch's
version counter. Clipping and zeroing in place increment it, too; hooks of a few parameters tell
whether backward has run. Nothing here reads a value, so nothing waits for a GPU.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from psworker.model.change_detector import SAMPLE_TENSOR_COUNT

HOOKED_TENSOR_COUNT = 8
"""Parameters with a hook; each costs 2 us a backward."""

_GRADIENT = attrgetter("grad")

Mark = tuple["weakref.ref[Tensor]", int] | None
"""A gradient and its version. Weak: script and torch decide how long a gradient lives; an id could
be used again.
"""


class GradientWatch:
    """Watches the gradients of one optimizer.

    Args:
        parameters: The optimizer's parameters.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._all = parameters
        self._watched = parameters[:: len(parameters) // SAMPLE_TENSOR_COUNT + 1]
        self._marks: list[Mark] = [None] * len(self._watched)
        stride = -(-len(self._watched) // HOOKED_TENSOR_COUNT)
        self._hooked = range(0, len(self._watched), max(1, stride))
        # the hooks refer to this list only: no cycle keeps the parameters alive
        self._fired, self._known_fired = [0], 0
        self._has_run_backward = False
        self._hooks = [
            add_gradient_hook(self._watched[place], _counter(self._fired)) for place in self._hooked
        ]

    def has_gradients(self) -> bool:
        """Return whether any of the parameters has a gradient."""
        return any(map(is_not, map(_GRADIENT, self._all), repeat(None)))

    def mark(self) -> None:
        """Compare later gradients with the current ones."""
        self._known_fired = self._fired[0]
        self._has_run_backward = False
        self._marks = [
            (weakref.ref(grad), grad._version) if grad is not None else None
            for grad in self._gradients()
        ]

    def record_backwards_of(self, network: nn.Module) -> None:
        """Let each backward of a network count as a change: its gradients may come later, all at
        once.
        """
        self._hooks.append(network.register_forward_hook(self._expect_backward))

    def _expect_backward(self, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self.record_backward)  # type: ignore[no-untyped-call]
                return

    def record_backward(self, _: object = None) -> None:
        """Record a backward."""
        self._has_run_backward = True

    def has_changed(self) -> bool:
        """Return whether a gradient was added since `mark`, and not dropped."""
        if self._has_run_backward:
            return True
        changed = set()
        for place, (grad, mark) in enumerate(zip(self._gradients(), self._marks, strict=True)):
            if grad is None:
                continue
            if mark is None or mark[0]() is not grad:
                return True
            if mark[1] != grad._version:
                changed.add(place)
        # without a hooked parameter among them, the script has not changed all of them in place
        return bool(changed) and (
            self._fired[0] > self._known_fired or changed.isdisjoint(self._hooked)
        )

    def _gradients(self) -> Iterator[Tensor | None]:
        return map(_GRADIENT, self._watched)

    def close(self) -> None:
        """Remove the hooks from the parameters and networks."""
        for hook in self._hooks:
            hook.remove()


def _counter(fired: list[int]) -> Callable[[Tensor], None]:
    def count(_: Tensor) -> None:
        fired[0] += 1

    return count


def add_gradient_hook(parameter: Tensor, function: Callable[[Tensor], None]) -> Any:
    """Call a function with the parameter after each new gradient of it; return the handle.

    torch accepts a hook only while the parameter requires grad.
    """
    trains = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)
    return handle
