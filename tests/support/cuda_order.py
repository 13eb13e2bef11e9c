"""Checks the ordering of GPU work without a GPU: finds unordered accesses to a buffer.

Everything is computed on the CPU. The host and each stream have a vector clock (program order,
events, waits, blocking calls). Two accesses to the same bytes, one of them a write, without an
order between them raise Disorder. A copy between a GPU and unpinned memory does so too.

Not simulated: kernels, the allocator, contexts, several devices, threads. Backward runs in the
script's thread on its current stream. Only the buffers are watched, not gradients and activations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from psworker.core.results import PushResult
from psworker.model import adapter
from psworker.model.flat_buffer import CudaBuffer, tensor_of
from tests.support.late_client import LateClient, LateFlow

Kind = Literal["device", "pinned", "host"]
Clock = dict[str, int]

HOST = "the host"
SYNCS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
"""Operations that make the host wait for their stream."""
UNREAD = {"aten::set_", "aten::empty_like", "aten::zeros_like", "aten::ones_like"}
"""Operations that use tensors but not their values."""


class Disorder(AssertionError):
    """Two accesses without an order."""


@dataclass(frozen=True, slots=True)
class Access:
    """One access. actor: the host or a stream; tick: time of its own clock."""

    start: int
    stop: int
    writes: bool
    actor: str
    tick: int
    what: str


@dataclass(slots=True)
class Region:
    """Watched memory."""

    name: str
    kind: Kind
    base: int
    nbytes: int
    accesses: list[Access] = field(default_factory=list)


class Event:
    """torch.cuda.Event, whose query returns False as often as possible, or always True."""

    def __init__(self, order: "Order", clock: Clock) -> None:
        self._order, self._clock = order, clock

    def query(self) -> bool:
        if self._order.quick:
            self.synchronize()
        return self._order.quick

    def synchronize(self) -> None:
        _merge(self._order.clocks[HOST], self._clock)

    def wait_on(self, stream: "Stream") -> None:
        _merge(self._order.clocks[stream.name], self._clock)


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, order: "Order", name: str) -> None:
        self.name, self._order = name, order
        order.clocks[name] = {}

    def record_event(self) -> Event:
        self._order.issue(self.name)
        return Event(self._order, dict(self._order.clocks[self.name]))

    def wait_event(self, event: Event) -> None:
        event.wait_on(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())


class Order(TorchDispatchMode):
    """Watches the operations in its context.

    Args:
        quick: Whether events are done at once.
        pins_client: Whether client memory is pinned.
    """

    def __init__(self, quick: bool, pins_client: bool = False) -> None:
        super().__init__()
        self.quick = quick
        self.pins_client = pins_client
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.stream = Stream(self, "the script's stream")
        self._regions: list[Region] = []
        self._waits = True

    def watch(self, name: str, kind: Kind, memory: Tensor) -> None:
        """Check accesses to this memory from now on."""
        self._regions.append(Region(name, kind, memory.data_ptr(), memory.nbytes))

    def nbytes(self, name: str) -> int:
        """Return the size of a region."""
        return next(region.nbytes for region in self._regions if region.name == name)

    def another_stream(self) -> Stream:
        return Stream(self, f"stream {len(self.clocks)}")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """torch.cuda.stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def client(self) -> Iterator[None]:
        """Context in which no operation waits for a stream."""
        before, self._waits = self._waits, False
        try:
            yield
        finally:
            self._waits = before

    def issue(self, stream: str) -> None:
        """Order a stream's work after everything that the host has done."""
        _merge(self.clocks[stream], self.clocks[HOST])

    def touch(self, name: str, start: int, stop: int, writes: bool, what: str) -> None:
        """Note an access by the host that torch does not see."""
        for region in self._regions:
            if region.name == name:
                self._enter(region, start, stop, writes, HOST, what)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, given = function._schema.name, list(_given(function, args, kwargs or {}))
        places = [
            (place, writes)
            for tensor, writes in given
            if (place := self._place(tensor)) is not None
        ]
        kinds = {region.kind for (region, _, _), _ in places}
        actor = self.stream.name if "device" in kinds else HOST
        assert not kinds >= {"device", "host"}, (
            f"{name} between a GPU and memory that is not pinned"
        )
        if actor != HOST:
            self.issue(actor)
        for (region, start, stop), writes in () if name in UNREAD else places:
            self._enter(region, start, stop, writes, actor, name)
        crosses = (
            kinds >= {"device", "pinned"}
            and True not in args[2:]
            and not (kwargs or {}).get("non_blocking")
        )
        result = function(*args, **(kwargs or {}))
        if self._waits and (name in SYNCS or crosses):
            _merge(self.clocks[HOST], self.clocks[self.stream.name])
        return result

    def _place(self, tensor: Tensor) -> tuple[Region, int, int] | None:
        """Return region and byte range; a tensor with strides covers first to last byte."""
        if not tensor.numel() or tensor.layout is not torch.strided:
            return None
        first = tensor.data_ptr()
        last = sum(
            (side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        for region in self._regions:
            if region.base <= first < region.base + region.nbytes:
                return (
                    region,
                    first - region.base,
                    first - region.base + (last + 1) * tensor.itemsize,
                )
        return None

    def _enter(
        self, region: Region, start: int, stop: int, writes: bool, actor: str, what: str
    ) -> None:
        clock = self.clocks[actor]
        tick = clock[actor] = clock.get(actor, 0) + 1
        for past in region.accesses:
            meet = past.start < stop and start < past.stop and (writes or past.writes)
            if meet and clock.get(past.actor, 0) < past.tick:
                raise Disorder(
                    f"{region.name}: {what} of [{start}, {stop}) by {actor} does not wait for "
                    f"{past.what} of [{past.start}, {past.stop}) by {past.actor}"
                )
        if writes:  # later operations are ordered after these, too
            region.accesses = [
                past for past in region.accesses if not (start <= past.start and past.stop <= stop)
            ]
        new = Access(start, stop, writes, actor, tick, what)
        region.accesses = [past for past in region.accesses if not _replaces(new, past)] + [new]


def _replaces(new: Access, past: Access) -> bool:
    same = (new.start, new.stop, new.writes, new.actor) == (
        past.start,
        past.stop,
        past.writes,
        past.actor,
    )
    return same and new.tick > past.tick


def _merge(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        clock[actor] = max(tick, clock.get(actor, 0))


def _given(function: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield tensors that are read or, True, written; not those of which only a view is made."""
    for place, argument in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor, alias is not None


class OrderedClient(LateClient):
    """A client that notes accesses of the host to buffers and those of its network."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def flat_buffers(self) -> tuple[memoryview, memoryview]:
        both = super().flat_buffers()
        kind: Kind = "pinned" if self._order.pins_client else "host"
        for name, memory in zip(("gradients", "weights"), both, strict=True):
            self._order.watch(name, kind, tensor_of(memory))
        return both

    def start(self, buffer: memoryview) -> None:
        with self._order.client():
            super().start(buffer)

    def exchange(self, **call: Any) -> PushResult:
        moving = self.plan.section("buffer").stop
        for name in ("gradients", "weights"):
            if call[name] is not None:
                self._order.touch(name, 0, moving, name == "weights", "an exchange")
        with self._order.client():
            return super().exchange(**call)

    def begin(self) -> LateFlow:
        self.sent.append([])
        self.open = flow = OrderedFlow(self, self._gradients, self._received)
        flow.order = self._order
        return flow


class OrderedFlow(LateFlow):
    order: Order

    def send(self, start: int, stop: int) -> None:
        self.order.touch("gradients", start, stop, False, "sending")
        super().send(start, stop)

    def finish(self, **call: Any) -> PushResult:
        moving = self._client.plan.section("buffer").stop
        self.order.touch("gradients", 0, moving, False, "sending")
        self.order.touch("weights", 0, moving, True, "receiving")
        return super().finish(**call)

    def wait(self, start: int, stop: int) -> None:
        self.order.touch("weights", start, stop, True, "receiving")
        super().wait(start, stop)


@contextmanager
def fake_gpu(
    quick: bool, buffer: type[CudaBuffer] = CudaBuffer, pins_client: bool = False
) -> Iterator[Order]:
    """Context with CudaBuffers in CPU memory and streams in torch.cuda."""
    order = Order(quick, pins_client)
    zeros, names = torch.zeros, cycle(("gradients", "weights"))

    class WatchedBuffer(buffer):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            name = next(names)
            order.watch(f"{name} on the GPU", "device", self.model_bytes)
            if self._pinned is not self.host:
                order.watch(f"pinned {name}", "pinned", self._pinned)

    def on_cpu(
        *args: Any, pin_memory: bool = False, device: object = None, **options: Any
    ) -> Tensor:
        return zeros(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", on_cpu)
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: pins_client)
        patch.setattr(torch.cuda, "Stream", lambda device=None: order.another_stream())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: order.stream)
        patch.setattr(torch.cuda, "stream", order.on)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(adapter, "only_device", lambda tensors: torch.device("cuda"))
        patch.setattr(adapter, "CudaBuffer", WatchedBuffer)
        with order:
            yield order
