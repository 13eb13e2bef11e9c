"""Gates at which a script waits for weights that still arrive, module by module.

Theory of operation:

- A module waits for its own weights before it runs forward, and before one of its tensors is read.
- A module may use weights of another one that is never called. So the weights of modules that no
  forward has called since the last step come first. Without gradients, torch takes more short
  cuts, and each module waits for all weights.
- Tensors that are reached in another way have no gate: through references from before, a traced
  module, a compiled function. A gradient for such a tensor is an error before it counts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.partition import ALIGNMENT_BYTES, ByteRange
from pscommon.tracing.recorder import worker_spans
from psworker.core.protocols import BegunPush
from psworker.model.adapter import ModelAdapter
from psworker.steps.step import StepContext

Owners = tuple[int, ...]
"""The numbers of the modules that have a tensor, ascending; several if it is tied."""

TENSOR_ATTRIBUTES = "_parameters", "_buffers"
"""Attributes in which a module has its tensors."""

FLAT_WEIGHTS = "_flat_weights"
"""Attribute in which a recurrent layer has its parameters a second time."""


class UnscriptableError(InvalidRequestError, AttributeError):
    """A hook has no name. Only torch.jit.script asks for it, and expects an AttributeError."""


class ModuleHook:
    """A hook of a module, which torch.jit.script cannot compile."""

    @property
    def __name__(self) -> str:
        raise UnscriptableError(
            "torch.jit.script cannot compile a model with overlap, or a copy of it: its modules "
            "have hooks. Try: script a new model that has loaded the state_dict(), or leave "
            "overlap off"
        )


class WeightGate(ModuleHook):
    """A hook before a module runs, or before its state is read or loaded.

    A copy of the module has an OpenGate instead.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        self._function()

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return OpenGate, ()


class OpenGate(ModuleHook):
    """The hook in a copy of the model, which has weights of its own."""

    def __call__(self, *_: Any) -> None:
        """Do nothing: no weights are on their way."""


class GatedDict(dict[str, Any]):
    """A module's parameters or buffers. A read waits for them; a copy is a plain dict."""

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
    """A recurrent layer's list of its parameters. A read waits for them; a copy is a plain list.

    On a GPU, scripts call flatten_parameters() before the layer. It copies the parameters from
    this list, and the layer computes with the copies.
    """

    def __init__(self, tensors: list[Any], gate: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._gate = gate

    def __iter__(self) -> Iterator[Any]:
        self._gate()
        return super().__iter__()

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return list, (list(self),)


def add_state_gates(model: nn.Module, settle: Callable[[], None]) -> list[Any]:
    """Call `settle` before state_dict and load_state_dict of each module; return the handles."""
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
            f"{name} was scripted or traced, so it cannot wait for weights. Try: leave overlap and "
            "pipeline off"
        )


class WeightGates:
    """All gates of one model. See the module."""

    def __init__(self, context: StepContext) -> None:
        model = context.model
        self._adapter = adapter = cast(ModelAdapter, context.adapter)
        self._begin_phase = context.begin_phase
        self._rejoin_in_forward = context.rejoin_in_forward
        self._begun: BegunPush | None = None
        modules = list(model.modules())
        extents = adapter.moving_extents()
        self._owned, self._parts = _parts(modules, extents)
        place_of = {id(tensor): place for place, tensor in enumerate(adapter.trainable.tensors)}
        self._places = [
            {place_of[id(p)] for p in module.parameters(recurse=False) if id(p) in place_of}
            for module in modules
        ]
        self._awaited: dict[Owners, list[ByteRange]] = {}
        self._unread: set[int] = set()
        self._called: set[int] = set()
        self._first: list[int] = []
        self._hooks = add_state_gates(model, context.wait)
        for number, module in enumerate(modules):
            gate = WeightGate(partial(self.pass_through, number))
            self._hooks.append(module.register_forward_pre_hook(gate, prepend=True))
            for kind in TENSOR_ATTRIBUTES:
                module.__dict__[kind] = GatedDict(
                    module.__dict__[kind], partial(self._read, number)
                )
            if isinstance(module, nn.RNNBase):
                module.__dict__[FLAT_WEIGHTS] = GatedList(
                    module.__dict__[FLAT_WEIGHTS], partial(self._read, number)
                )
        self._modules = modules

    def expect(self, begun: BegunPush, stepped: set[int]) -> None:
        """Expect the weights of a push. stepped: Places of the tensors that had a gradient."""
        self._begun, self._awaited = begun, self._owned.copy()
        self._first = sorted(self._parts.keys() - self._called)
        self._called = set()
        self._unread = stepped

    def pass_through(self, number: int) -> None:
        """Wait for the weights of a module that is about to run forward."""
        self._called.add(number)
        self._read(number)

    def _read(self, number: int) -> None:
        self._unread -= self._places[number]
        if self._begun is not None:
            with self._rejoin_in_forward():
                self._wait_for(number)
        self._adapter.weights.join()

    def _wait_for(self, number: int) -> None:
        if not torch.is_grad_enabled():
            return self.settle()
        wanted = [*self._first, number]
        self._first = []
        self._unread.difference_update(*(self._places[each] for each in wanted))
        parts = [part for each in wanted for part in self._parts.get(each, ())]
        if any(part in self._awaited for part in parts):
            self._wait([span for part in parts for span in self._awaited.pop(part, ())])
        if not self._awaited:
            self.settle()
        return None

    def check(self, place: int) -> None:
        """Raise InvalidRequestError if a tensor got a gradient before its weights were awaited."""
        if place in self._unread:
            raise InvalidRequestError(
                f"{self._adapter.trainable.names[place]} has got a gradient, but its module has "
                "not waited for the new weights. Try: call job.wait() after optimizer.step(), or "
                "leave overlap off"
            )

    def settle(self) -> None:
        """Wait until all weights are in the model; every tensor may be read afterwards."""
        self.receive()
        self._adapter.weights.join()
        self._unread.clear()

    def receive(self) -> None:
        """Wait until all weights have arrived. Tensors that no gate has awaited stay unread."""
        if self._begun is None:
            return
        spans = [span for owned in self._awaited.values() for span in owned]
        self._awaited.clear()
        self._wait(spans)
        begun, self._begun = self._begun, None
        begun.close()
        self._adapter.changes.record_arrival()

    def _wait(self, spans: list[ByteRange]) -> None:
        begun = self._begun
        assert begun is not None
        before = self._begin_phase("pull")
        try:
            for start, stop in spans:
                begun.wait(start, stop)
        except BaseException:
            # the model holds weights of two versions now, as after an exchange that failed
            self._begun = None
            begun.close()
            raise
        finally:
            self._begin_phase(before)
        began = worker_spans.now()
        self._adapter.weights.from_host(spans)
        if began:
            worker_spans.add_of_step("scatter", began)

    def close(self) -> None:
        """Remove all gates from the model."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            for kind in TENSOR_ATTRIBUTES:
                module.__dict__[kind] = dict(module.__dict__[kind])
            if isinstance(module, nn.RNNBase):
                module.__dict__[FLAT_WEIGHTS] = list(module.__dict__[FLAT_WEIGHTS])


def _parts(
    modules: Sequence[nn.Module], extents: dict[int, ByteRange]
) -> tuple[dict[Owners, list[ByteRange]], dict[int, list[Owners]]]:
    """Return the byte ranges by owners, and the owners by module. extents: By id of the tensor.

    Tensors of several modules are a part of their own, which arrives once: a buffer that the
    first module has updated must not be overwritten when the second one is called.
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
    """Return the ranges; neighbours with only padding between them become one."""
    found: list[ByteRange] = []
    for extent in extents:
        if found and extent.start - found[-1].stop < ALIGNMENT_BYTES:
            found[-1] = ByteRange(found[-1].start, max(found[-1].stop, extent.stop))
        elif extent.nbytes:
            found.append(extent)
    return found
