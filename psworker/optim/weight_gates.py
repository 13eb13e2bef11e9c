"""Weights that are used while others still arrive: whoever calls a module, or reads a tensor of
it, waits for its own.

Tensors that are reached in another way - through references kept from before, a traced module, a
compiled function - are not waited for. That is found out when such a tensor gets a gradient,
before anything of it counts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.partition import ALIGNMENT_BYTES, ByteRange
from psworker.core.protocols import PushStream
from psworker.model.adapter import ModelAdapter

Enter = Callable[[str], str]
"""Tells the job what the worker does from now on; returns what it did before."""

Healing = Callable[[], AbstractContextManager[None]]
"""A body that finds the job gone on without this worker is left, and the worker is back, with
all weights here.
"""


Owners = tuple[int, ...]
"""The numbers of the modules that have a tensor, ascending: several where it is tied."""

TENSORS = "_parameters", "_buffers"
"""Where a module has them."""

FLAT = "_flat_weights"
"""Where a recurrent layer has its parameters a second time."""


class UnscriptableError(InvalidRequestError, AttributeError):
    """A hook has no name, by which torch.jit.script asks first and nobody else counts on it."""


class ModuleHook:
    """Of a module, in Python: torch.jit.script would have to compile it."""

    @property
    def __name__(self) -> str:
        raise UnscriptableError(
            "torch.jit.script cannot compile the hooks by which modules wait for weights with "
            "overlap, and copies of such modules have some as well: script a new model that has "
            "loaded this one's state_dict(), or leave overlap off"
        )


class WeightGate(ModuleHook):
    """A hook before a module runs, or before its state is read or loaded. A copy of the module
    has an OpenGate.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        self._function()

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return OpenGate, ()


class OpenGate(ModuleHook):
    """The hook in a copy of the model, which has weights of its own and waits for nothing."""

    def __call__(self, *_: Any) -> None:
        """Nothing to do."""


class GatedDict(dict[str, Any]):
    """A module's parameters or buffers, for which is waited before somebody reads one. A copy is
    a plain dict.
    """

    def __init__(self, tensors: dict[str, Any], gate: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._gate = gate

    def __getitem__(self, name: str) -> Any:
        self._gate()
        return super().__getitem__(name)

    def values(self) -> Any:
        self._gate()
        return super().values()

    def items(self) -> Any:
        self._gate()
        return super().items()

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self.items()),)


class GatedList(list[Any]):
    """As Watched, of a recurrent layer's list of its parameters: on a GPU flatten_parameters(),
    which scripts call before the layer, copies from there, and the layer then computes with the
    copies.
    """

    def __init__(self, tensors: list[Any], gate: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._gate = gate

    def __iter__(self) -> Iterator[Any]:
        self._gate()
        return super().__iter__()

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return list, (list(self),)


def barriers(model: nn.Module, settle: Callable[[], None]) -> list[Any]:
    """Before state_dict and load_state_dict of the model or any part of it: settle. Returns the
    handles.
    """
    gate = WeightGate(settle)
    handles: list[Any] = []
    for name, module in model.named_modules():
        _refuse_scripted(name or "the model", module)
        handles.append(module.register_state_dict_pre_hook(gate))
        handles.append(module.register_load_state_dict_pre_hook(gate))
    return handles


def _refuse_scripted(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise InvalidRequestError(
            f"{name} was scripted or traced, so nobody sees when it is used: leave overlap and "
            f"pipeline off"
        )


class WeightGates:
    """Lets each module wait for its own weights and buffers before it runs forward, or one of
    them is read.

    A module may keep references to weights of another one that is never called itself. So
    whatever no forward has called since the last step is waited for first of all; and without
    gradients, where torch takes short cuts more often, everything is. enter, healing: see above;
    settle: what state_dict waits for, this object's and more.
    """

    def __init__(
        self,
        bridge: ModelAdapter,
        model: nn.Module,
        enter: Enter,
        healing: Healing,
        settle: Callable[[], None],
    ) -> None:
        self._bridge = bridge
        self._enter = enter
        self._healing = healing
        self._flow: PushStream | None = None
        modules = list(model.modules())
        extents = bridge.moving_extents()
        self._owned, self._parts = _parts(modules, extents)
        place_of = {id(tensor): place for place, tensor in enumerate(bridge.trainable.tensors)}
        self._places = [
            {place_of[id(p)] for p in module.parameters(recurse=False) if id(p) in place_of}
            for module in modules
        ]
        self._left: dict[Owners, list[ByteRange]] = {}
        self._unread: set[int] = set()
        self._called: set[int] = set()
        self._first: list[int] = []
        self._hooks = barriers(model, settle)
        for number, module in enumerate(modules):
            gate = WeightGate(partial(self.pass_through, number))
            self._hooks.append(module.register_forward_pre_hook(gate, prepend=True))
            for kind in TENSORS:
                module.__dict__[kind] = GatedDict(
                    module.__dict__[kind], partial(self._read, number)
                )
            if isinstance(module, nn.RNNBase):
                module.__dict__[FLAT] = GatedList(
                    module.__dict__[FLAT], partial(self._read, number)
                )
        self._modules = modules

    def expect(self, flow: PushStream, stepped: set[int]) -> None:
        """The weights of this push are on their way; stepped: which trainable tensors it had
        gradients for.
        """
        self._flow, self._left = flow, self._owned.copy()
        self._first = sorted(self._parts.keys() - self._called)
        self._called = set()
        self._unread = stepped

    def pass_through(self, number: int) -> None:
        """A module is about to run forward."""
        self._called.add(number)
        self._read(number)

    def _read(self, number: int) -> None:
        self._unread -= self._places[number]
        if self._flow is not None:
            with self._healing():
                self._wait_for(number)
        self._bridge.weights.join()

    def _wait_for(self, number: int) -> None:
        if not torch.is_grad_enabled():
            return self.settle()
        wanted = [*self._first, number]
        self._first = []
        self._unread.difference_update(*(self._places[each] for each in wanted))
        parts = [part for each in wanted for part in self._parts.get(each, ())]
        if any(part in self._left for part in parts):
            self._wait([span for part in parts for span in self._left.pop(part, ())])
        if not self._left:
            self.settle()
        return None

    def check(self, place: int) -> None:
        """A trainable tensor has got a gradient: InvalidRequestError unless its weights were
        waited for before.
        """
        if place in self._unread:
            raise InvalidRequestError(
                f"{self._bridge.trainable.names[place]} has got a gradient, but nobody had waited "
                "for its new weights, so it may be one of old weights: the forward came before "
                "the last step, or did not reach them through their module (a traced module, a "
                "compiled function, references kept from before). Call job.wait() after "
                "optimizer.step(), or leave overlap off"
            )

    def settle(self) -> None:
        """All that is still on its way, for whoever may read any of it."""
        self.land()
        self._bridge.weights.join()
        self._unread.clear()

    def land(self) -> None:
        """All that is still on its way. What nobody has waited for stays unread."""
        if self._flow is None:
            return
        spans = [span for owned in self._left.values() for span in owned]
        self._left.clear()
        self._wait(spans)
        flow, self._flow = self._flow, None
        flow.close()
        self._bridge.changes.record_arrival()

    def _wait(self, spans: list[ByteRange]) -> None:
        flow = self._flow
        assert flow is not None
        before = self._enter("pull")
        try:
            for start, stop in spans:
                flow.wait(start, stop)
        except BaseException:
            # the model holds weights of two versions now, as after an exchange that failed
            self._flow = None
            flow.close()
            raise
        finally:
            self._enter(before)
        self._bridge.weights.from_host(spans)

    def close(self) -> None:
        """The model is its own again."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            for kind in TENSORS:
                module.__dict__[kind] = dict(module.__dict__[kind])
            if isinstance(module, nn.RNNBase):
                module.__dict__[FLAT] = list(module.__dict__[FLAT])


def _parts(
    modules: Sequence[nn.Module], extents: dict[int, ByteRange]
) -> tuple[dict[Owners, list[ByteRange]], dict[int, list[Owners]]]:
    """Where tensors lie, by the modules that have them; and of each module all parts. extents:
    by id of the tensor.

    What several modules have is a part of its own, so that it comes once: a buffer that the
    first of them has gone on with must not be overwritten when the second is called.
    """
    owners: dict[int, list[int]] = {}
    for number, module in enumerate(modules):
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            if id(tensor) in extents:
                owners.setdefault(id(tensor), []).append(number)
    owned: dict[Owners, list[ByteRange]] = {}
    for tensor_id, numbers in owners.items():
        owned.setdefault(tuple(numbers), []).append(extents[tensor_id])
    merged = {part: spans for part, places in owned.items() if (spans := _merged(sorted(places)))}
    parts: dict[int, list[Owners]] = {}
    for part in merged:
        for number in part:
            parts.setdefault(number, []).append(part)
    return merged, parts


def _merged(extents: Sequence[ByteRange]) -> list[ByteRange]:
    """Neighbours with only padding between them as one."""
    found: list[ByteRange] = []
    for extent in extents:
        if found and extent.start - found[-1].stop < ALIGNMENT_BYTES:
            found[-1] = ByteRange(found[-1].start, max(found[-1].stop, extent.stop))
        elif extent.nbytes:
            found.append(extent)
    return found
