"""Steps of a model on a GPU wait for their inputs at any timing of the GPU; checked with a fake
GPU.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from pscommon.core.partition import ByteRange
from psworker.job import Job
from psworker.model import flat_buffer
from psworker.model.flat_buffer import CopyEvent, CudaBuffer
from psworker.steps import overlapped_step as overlap
from tests.support.cuda_order import Disorder, OrderedClient, fake_gpu
from tests.support.late_client import values
from tests.support.overlap_cases import (
    MODELS,
    STEPS,
    Make,
    Step,
    adam,
    normed,
    perceptron,
    seeded,
    usual,
)

Values = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "piece_nbytes", lambda nbytes: 128)
    monkeypatch.setattr(flat_buffer, "COPY_PIECE_BYTES", 192)


def trained(
    make: Make,
    step: Step,
    quick: bool,
    buffer: type[CudaBuffer] = CudaBuffer,
    overlaps: bool = True,
    pins_client: bool = False,
) -> Values:
    model = seeded(make)
    with fake_gpu(quick, buffer, pins_client) as order:
        optimizer = Job(OrderedClient(order)).optimizer(adam(model), model, overlap=overlaps)
        for number in range(4):
            step(model, optimizer, number)
        return values(model)


def plain(make: Make, step: Step) -> Values:
    model = seeded(make)
    optimizer = adam(model)
    for number in range(4):
        step(model, optimizer, number)
    return values(model)


def assert_same(found: Values, expected: Values) -> None:
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.every(5)
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "slow"])
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "whole"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_steps_of_every_model_are_ordered(make: Make, overlaps: bool, quick: bool) -> None:
    assert_same(trained(make, usual, quick, overlaps=overlaps), plain(make, usual))


@pytest.mark.every(5)
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "whole"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_kind_of_step_is_ordered(step: Step, overlaps: bool) -> None:
    assert_same(trained(normed, step, False, overlaps=overlaps), plain(normed, step))


def test_pinned_client_memory_needs_one_copy() -> None:
    """The copies to and from it are ordered with what the client does."""
    step = STEPS["accumulated"]
    found = trained(normed, step, False, overlaps=False, pins_client=True)

    assert_same(found, plain(normed, step))


class Async(OrderedClient):
    policy = "async"


@pytest.mark.parametrize("make", [normed, perceptron])
@pytest.mark.parametrize("step", [usual, STEPS["accumulated"], STEPS["evaluated"]])
def test_steps_of_a_pipeline_are_ordered(make: Make, step: Step) -> None:
    model = seeded(make)
    with fake_gpu(quick=False) as order:
        client = Async(order)
        optimizer = Job(client).optimizer(adam(model), model, pipeline=True)
        for number in range(4):
            step(model, optimizer, number)
        optimizer.model.wait()

    assert client.version == 4


def test_frozen_tensors_have_no_gradient_memory_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1000))
    with fake_gpu(quick=False) as order:
        optimizer = Job(OrderedClient(order)).optimizer(
            torch.optim.SGD(model[0].parameters(), lr=0.1), model
        )
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        gradients, weights = (
            order.nbytes(f"{name} on the GPU") for name in ("gradients", "weights")
        )

    assert gradients < 200
    assert weights > 20_000


class SharedBufferModule(nn.Module):
    """Module that changes a buffer of several modules at each call."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", seen)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().abs().mean()
        out: Tensor = torch.tanh(self.layer(x)) + self.seen
        return out


def shared_buffer_model() -> nn.Module:
    seen = torch.zeros(())
    return nn.Sequential(SharedBufferModule(seen), SharedBufferModule(seen), nn.Linear(4, 2))


def test_modules_that_share_a_buffer_change_it_one_after_another() -> None:
    assert_same(trained(shared_buffer_model, usual, False), plain(shared_buffer_model, usual))


def test_a_second_stream_also_waits_for_weights() -> None:
    """As in plain torch, a stream needs to wait only for the script's stream after step()."""

    class Sided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lent, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    model = Sided()
    with fake_gpu(quick=False) as order:
        side = order.another_stream()

        def forward(x: Tensor) -> Tensor:
            side.wait_stream(order.stream)
            first = model.first(x)
            with order.on(side):
                second = x @ model.lent.weight
            order.stream.wait_stream(side)
            out: Tensor = model.last(first + second)
            return out

        optimizer = Job(OrderedClient(order)).optimizer(adam(model), model, overlap=True)
        for _ in range(3):
            forward(torch.ones(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


# ---- planted bugs --------------------------------------------------------------------------------


class Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""


class ComputesBeforeWeightsArrive(CudaBuffer):
    def from_host(self, spans: Sequence[ByteRange]) -> None:
        self._follow_model()
        for span in spans:
            self._pinned[slice(*span)].copy_(self.host[slice(*span)])
            self._last_copy = self._copy(self.model_bytes, self._pinned, span)


class CopiesBeforeComputation(CudaBuffer):
    def _follow_model(self) -> None:
        pass


class SendsBeforeArrival(CudaBuffer):
    def to_host(self, spans: Sequence[ByteRange]) -> CopyEvent:
        self._follow_model()
        for span in spans:
            self._copy(self._pinned, self.model_bytes, span)
            self.host[slice(*span)].copy_(self._pinned[slice(*span)])
        return Done()


class CopiesWithoutPinnedMemory(CudaBuffer):
    def to_host(self, spans: Sequence[ByteRange]) -> CopyEvent:
        for start, stop in spans:
            self.host[start:stop].copy_(self.model_bytes[start:stop])
        return Done()


@pytest.mark.parametrize(
    ("buffer", "fault"),
    [
        (
            ComputesBeforeWeightsArrive,
            "weights on the GPU: .* by the script's stream does not wait for aten::copy_",
        ),
        (
            CopiesBeforeComputation,
            "on the GPU: aten::copy_ .* by stream . does not wait for .* by the script's stream",
        ),
        (
            SendsBeforeArrival,
            "pinned .*: aten::copy_ .* by the host does not wait for aten::copy_ .* by stream",
        ),
        (CopiesWithoutPinnedMemory, "between a GPU and memory that is not pinned"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "whole"])
def test_a_missing_wait_is_detected(buffer: type[CudaBuffer], fault: str, overlaps: bool) -> None:
    with pytest.raises(AssertionError, match=fault):
        trained(perceptron, usual, False, buffer, overlaps)


@pytest.mark.parametrize("rests", [True, False])
def test_pinned_memory_is_reused_only_after_the_gpu_has_read_it(rests: bool) -> None:
    with fake_gpu(quick=False) as order:
        buffer = CudaBuffer(memoryview(bytearray(64)), torch.device("cpu"))
        order.watch("pinned", "pinned", buffer._pinned)
        order.watch("model_bytes", "device", buffer.model_bytes)
        buffer.from_host([ByteRange(0, 64)])
        if rests:
            buffer.wait_until_read()

        with (
            nullcontext()
            if rests
            else pytest.raises(Disorder, match=r"pinned: .* by the host does not wait for")
        ):
            buffer.from_host([ByteRange(0, 64)])
