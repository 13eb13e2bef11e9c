"""Flat buffers: their memory, the cost of a step with many tensors, and delayed copies from and
to a GPU.
"""

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from pscommon.core.partition import ByteRange
from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.job import Job
from psworker.model.adapter import ModelAdapter
from psworker.model.change_detector import ChangeDetector
from psworker.model.flat_buffer import (
    CopyEvent,
    CudaBuffer,
    DoubleBuffer,
    FlatBuffer,
    HostCopy,
    are_equal_on_device,
)
from psworker.steps import overlapped_step as overlap
from tests.support.late_client import LateClient, values
from tests.support.overlap_cases import (
    MODELS,
    Make,
    Step,
    accumulated,
    adam,
    clipped,
    normed,
    seeded,
    usual,
)

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU on this machine"
)


class RecordingClient(LocalClient):
    def flat_buffers(self) -> tuple[memoryview, memoryview]:
        self.given = super().flat_buffers()
        return self.given

    def exchange(self, **call: Any) -> PushResult:
        self.call = call
        return super().exchange(**call)


def test_weights_and_gradients_use_the_memory_of_the_client() -> None:
    client, model = RecordingClient(), normed()
    optimizer = Job(client).optimizer(adam(model), model)
    gradients, weights = (torch.frombuffer(memory, dtype=torch.uint8) for memory in client.given)

    usual(model, optimizer, 0)

    start = client.plan.extent(0).start
    assert model[0].weight.data_ptr() == weights[start:].data_ptr()
    assert client.call["gradients"] is client.given[0]
    assert client.call["weights"] is client.given[1]
    assert gradients.any()
    weights.zero_()
    assert not model[0].weight.any()


def test_a_model_without_tensors_has_buffers() -> None:
    model = nn.ParameterList([nn.Parameter(torch.empty(0))])
    optimizer = Job(LocalClient()).optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    optimizer.step()

    assert optimizer.result is not None
    assert optimizer.result.version == 1


class ImmediateClient(LateClient):
    """Client that answers at once without computing, so that only the worker's own code counts."""

    def exchange(self, **call: Any) -> PushResult:
        return PushResult("applied", 1)


def instructions_of_a_step(tensors: int, overlaps: bool) -> int:
    """Return the number of Python instructions of one step."""
    shared = [nn.Parameter(torch.zeros(4)) for _ in range(tensors)]
    model = nn.ParameterList(shared)
    for name in ("one", "two"):
        model.register_buffer(name, torch.zeros(3))
    optimizer = Job(ImmediateClient()).optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=overlaps
    )
    count = 0

    def counted(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return counted

    for _ in range(2):
        count = 0
        for parameter in shared:
            parameter.grad = torch.ones(4)
        before = sys.gettrace()
        sys.settrace(counted)
        try:
            optimizer.step()
        finally:
            sys.settrace(before)
    return count


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_runs_no_python_code_per_tensor(overlaps: bool) -> None:
    """Both models have one bucket; the cost of buckets depends on bytes, not on tensors."""
    few, many = (instructions_of_a_step(count, overlaps) for count in (10, 1000))

    assert few > 100
    assert many - few < 1000


# ---- a fake GPU ----------------------------------------------------------------------------------


class DelayedCopy:
    """A copy that completes when a caller waits for it, or queries it a second time."""

    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies = copies
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 1:
            self.synchronize()
        return not self._copies

    def synchronize(self) -> None:
        while self._copies:
            target, source = self._copies.pop(0)
            target.copy_(source)


class DelayedBuffer(DoubleBuffer):
    """Buffer whose copies to the host complete later; until then the host has invalid bytes."""

    def to_host(self, spans: Sequence[ByteRange]) -> CopyEvent:
        pairs = [
            (self.host[start:stop], self.model_bytes[start:stop].clone()) for start, stop in spans
        ]
        for target, _ in pairs:
            target.fill_(0xFF)
        return DelayedCopy(pairs)


@pytest.fixture
def _two_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_buffers(
        self: ModelAdapter, memory: tuple[memoryview, memoryview], double_buffered: bool
    ) -> tuple[FlatBuffer, FlatBuffer]:
        return DelayedBuffer(memory[0]), DelayedBuffer(memory[1])

    monkeypatch.setattr(ModelAdapter, "_make_buffers", make_buffers)
    monkeypatch.setattr(overlap, "piece_nbytes", lambda nbytes: 128)


@pytest.mark.every(5)
@pytest.mark.usefixtures("_two_memories")
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("step", [usual, accumulated, clipped])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_delayed_copies_are_awaited(make: Make, step: Step, overlaps: bool) -> None:
    plain, model = (seeded(make) for _ in range(2))
    optimizer, theirs = (
        Job(LateClient()).optimizer(adam(model), model, overlap=overlaps),
        adam(plain),
    )

    for number in range(5):
        step(model, optimizer, number)
        step(plain, theirs, number)

    expected = values(plain)
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


@pytest.mark.usefixtures("_two_memories")
def test_a_gradient_is_not_sent_before_it_has_reached_the_host() -> None:
    """The copy of the second bucket is not complete during backward, so only the first is sent."""
    client, model = (
        LateClient(),
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)),
    )
    optimizer = Job(client).optimizer(adam(model), model, overlap=True)

    model(torch.ones(1, 8)).sum().backward()
    before = [start for start, _ in client.sent[0]]
    optimizer.step()

    assert before == [256]
    assert [start for start, _ in client.sent[0]] == [256, 0]


@pytest.mark.usefixtures("_two_memories")
def test_gradients_are_sent_before_the_weights_are_checked_for_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check of the weights waits for all work of the GPU."""
    client, model, sent = (
        LateClient(),
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)),
        [],
    )
    check = ChangeDetector.check

    def noted(changes: ChangeDetector, replaced: Iterable[int]) -> None:
        sent.append([start for start, _ in client.sent[-1]])
        check(changes, replaced)

    optimizer = Job(client).optimizer(adam(model), model, overlap=True)
    monkeypatch.setattr(ChangeDetector, "check", noted)
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert sent == [[256, 0], [256, 0]]


@pytest.mark.parametrize(
    "same",
    [FlatBuffer(memoryview(bytearray(64))).are_equal, are_equal_on_device],
    ids=["host", "device"],
)
def test_tensors_are_equal_if_their_bytes_are_equal(same: Any) -> None:
    nan, square = torch.tensor([torch.nan, 0.0]), torch.arange(6.0).view(2, 3)
    pairs = {
        "equal": (square, square.clone()),
        "not a number": (nan, nan.clone()),
        "sign of zero": (torch.zeros(2), -torch.zeros(2)),
        "last byte": (
            torch.tensor([1, 2], dtype=torch.int8),
            torch.tensor([1, 3], dtype=torch.int8),
        ),
        "other strides": (square, square.t().contiguous().t()),
        "other type": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        "sparse": (torch.zeros(2), torch.zeros(2).to_sparse()),
        "half": (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        "nothing": (torch.empty(0), torch.empty(0)),
    }
    views, tensors = zip(*pairs.values(), strict=True)

    found = dict(zip(pairs, same(views, tensors), strict=True))

    assert {name for name, equal in found.items() if equal} == {
        "equal",
        "not a number",
        "other strides",
        "half",
        "nothing",
    }
    assert same([], []) == []


class Event:
    """Fake of a GPU's copy that completes when the test sets `done`."""

    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_a_host_copy_is_finished_once_after_the_gpu_copy() -> None:
    events, source, target = (Event(), Event()), torch.full((8,), 1), torch.zeros(8).long()
    landing = HostCopy(
        list(zip(events, [ByteRange(0, 2), ByteRange(4, 6)], strict=True)), source, target
    )

    events[0].done = True
    assert not landing.query()
    assert not target.any()
    events[1].done = True
    assert landing.query()
    assert target.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    source.fill_(2)
    landing.synchronize()
    assert target.max() == 1, "the source may already be reused"


# ---- a GPU ---------------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_cuda
def test_a_cuda_buffer_copies_in_the_order_of_the_computation() -> None:
    buffer = CudaBuffer(memoryview(bytearray(64 << 20)), torch.device("cuda"))
    everything = [ByteRange(0, 64 << 20)]

    for value in range(1, 20):
        buffer.model_bytes.fill_(value)
        ready = buffer.to_host(everything)
        ready.synchronize()
        assert buffer.host.eq(value).all()
        buffer.host.fill_(100 + value)
        buffer.from_host(everything)
        assert buffer.model_bytes.eq(100 + value).all()
        buffer.wait_until_read()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("step", [usual, accumulated, clipped])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_overlap_on_a_gpu_changes_no_byte(make: Make, step: Step) -> None:
    runs = []
    for overlaps in (False, True):
        model = OnGpu(seeded(make))
        optimizer = Job(LateClient()).optimizer(adam(model), model, overlap=overlaps)
        for number in range(5):
            step(model, optimizer, number)
        runs.append(values(model))

    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


class OnGpu(nn.Module):
    """Model on the GPU with inputs and outputs on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model.to("cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x.cuda()).cpu()
        return out
