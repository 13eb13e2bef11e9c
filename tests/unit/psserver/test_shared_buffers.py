"""Shared memory of workers: the same bytes on both sides, only the newest offer, and no longer than
needed.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from pscommon.core.errors import InvalidRequestError, UnreachableError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.core.partition import PartitionPlan
from pscommon.parameters.partition import MAX_CACHED_VIEWS, ShardPartition, WorkerBuffer
from pscommon.settings.values import Lanes
from pscommon.system.shared_memory import SharedRegion
from pscommon.system.thread_team import ThreadTeam
from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.store import ParameterStore
from psserver.shard.worker_traffic import AttachedBuffers, WorkerBuffers
from tests.support.shared_memory import mapped_count
from tests.support.stores import SGD, Shards, begun, model, noise, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = model(((100,), "float32"), ((7,), "float32"), ((5,), "float32", "buffer"), optimizer=SGD)
BUFFER = 512 + 64


@pytest.fixture
def memories() -> AttachedBuffers:
    return AttachedBuffers("auto")


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    region = SharedRegion(2 * BUFFER)
    yield region
    region.close()


def attach(memories: AttachedBuffers, region: SharedRegion, number: int = 1) -> None:
    """Share the region, and attach it as the memory of worker 1 with this number."""
    descriptor = region.share()
    memories.add(1, WorkerBuffers.attached(number, descriptor, region.nbytes // 2))


def header(worker: int = 1, memory: int = 1) -> pb.PushPullHeader:
    return pb.PushPullHeader(worker=worker, memory=memory)


def test_both_sides_see_the_same_bytes(memories: AttachedBuffers, region: SharedRegion) -> None:
    region.memory[:3] = b"abc"
    attach(memories, region)
    buffers = memories.find(header())
    region.memory[3:5] = b"de"
    buffers.weights.flat[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)

    assert bytes(buffers.gradients.flat[:5].tolist()) == b"abcde"
    assert bytes(region.memory[BUFFER : BUFFER + 4]) == bytes([1, 2, 3, 4])
    assert (buffers.number, len(buffers.gradients.flat), len(buffers.weights.flat)) == (
        1,
        BUFFER,
        BUFFER,
    )


@pytest.mark.parametrize(("lanes", "allowed"), [("grpc", True), ("auto", True), ("shm", False)])
def test_a_server_for_shared_memory_refuses_pushes_over_grpc(lanes: Lanes, allowed: bool) -> None:
    if allowed:
        AttachedBuffers(lanes).check_network_allowed()
        return
    with pytest.raises(InvalidRequestError, match="runs with --lanes shm"):
        AttachedBuffers(lanes).check_network_allowed()


def test_a_region_of_another_size_is_refused_and_leaves_the_former_offer(
    memories: AttachedBuffers, region: SharedRegion
) -> None:
    attach(memories, region)
    other = SharedRegion(2 * BUFFER - 2)

    with pytest.raises(InvalidRequestError, match=rf"has {2 * BUFFER - 2} bytes, not {2 * BUFFER}"):
        WorkerBuffers.attached(2, other.share(), BUFFER)
    assert memories.find(header(memory=1)).number == 1


def test_only_the_newest_offer_of_a_worker_is_valid(
    memories: AttachedBuffers, region: SharedRegion
) -> None:
    for number in (1, 2):
        attach(memories, region, number)
    memories.find(header(memory=2)).weights.flat[0] = 9

    assert region.memory[BUFFER] == 9
    for other in (header(memory=1), header(memory=3), header(worker=2, memory=2)):
        with pytest.raises(UnreachableError, match="is not attached") as caught:
            memories.find(other)
        assert caught.value.reason == "NOT_ATTACHED"


def test_the_memory_of_a_removed_worker_is_detached(
    memories: AttachedBuffers, region: SharedRegion
) -> None:
    gc.collect()  # garbage of earlier tests may own some
    before = mapped_count()
    attach(memories, region)
    gradients = memories.find(header()).gradients
    memories.on_evict(1)
    memories.on_evict(1)
    assert mapped_count() == before + 2  # the staged push keeps its mappings
    gradients.flat[0] = 7
    assert region.memory[0] == 7
    del gradients

    assert mapped_count() == before + 1  # the mapping of the worker
    with pytest.raises(UnreachableError):
        memories.find(header())


def test_a_model_without_bytes_can_be_attached(memories: AttachedBuffers) -> None:
    attach(memories, SharedRegion(0))
    buffers = memories.find(header())

    assert (len(buffers.gradients.flat), len(buffers.weights.flat)) == (0, 0)


def test_views_of_a_flat_buffer_are_created_once_per_model() -> None:
    buffer, partition, other = (
        WorkerBuffer(torch.zeros(BUFFER, dtype=torch.uint8)),
        *(ShardPartition(PartitionPlan(SPEC, 1), 0) for _ in range(2)),
    )
    memory = buffer.find_ranges(partition)
    view = partition.view(memory, torch.float32, 0, 64)

    assert buffer.find_ranges(partition) is memory
    assert partition.view(memory, torch.float32, 0, 64) is view
    assert buffer.find_ranges(other) is not memory
    for start in range(2 * MAX_CACHED_VIEWS):
        partition.view(memory, torch.uint8, start, start + 1)
    assert len(memory.views) <= MAX_CACHED_VIEWS


@pytest.mark.parametrize("length", [0, BUFFER - 1, BUFFER - 64, BUFFER + 64])
def test_a_flat_buffer_of_another_model_is_refused(length: int) -> None:
    """It could otherwise end the server in the middle of an update."""
    store, buffer = begun(SPEC).stores[0], torch.zeros(length, dtype=torch.uint8)
    assert store.step_nbytes == BUFFER

    with pytest.raises(
        InvalidRequestError, match=f"a flat buffer of this model has {BUFFER} bytes, not {length}"
    ):
        store.stage_worker_buffer(WorkerBuffer(buffer), [])
    with pytest.raises(InvalidRequestError):
        store.copy_to(WorkerBuffer(buffer))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shared_memory_pushes_and_pulls_equal_those_over_grpc(shards: int) -> None:
    over_wire, in_buffers = begun(SPEC, shards), begun(SPEC, shards)
    for update in range(3):
        push = noise(SPEC, update, roles=("trainable", "buffer"))
        over_wire.step(push)
        buffer = flat_buffer_of(over_wire.plan.starts, push)
        in_buffers.apply(
            [[store.stage_worker_buffer(WorkerBuffer(buffer), []) for store in in_buffers.stores]],
            [1],
        )
    pulled = torch.zeros(BUFFER, dtype=torch.uint8)
    sizes = [store.copy_to(WorkerBuffer(pulled)) for store in in_buffers.stores]

    assert sum(sizes) == BUFFER
    weights = over_wire.weights()
    assert torch.equal(
        without_padding(pulled), without_padding(flat_buffer_of(over_wire.plan.starts, weights))
    )


def flat_buffer_of(starts: tuple[int, ...], values: dict[str, torch.Tensor]) -> torch.Tensor:
    buffer = torch.zeros(BUFFER, dtype=torch.uint8)
    for start, tensor in zip(starts, SPEC.tensors, strict=True):
        buffer[start : start + tensor.nbytes] = values[tensor.name].contiguous().view(torch.uint8)
    return buffer


def without_padding(buffer: torch.Tensor) -> torch.Tensor:
    return torch.cat([buffer[:400], buffer[448:476], buffer[512:532]])


OPTIMIZERS = {
    "sgd": {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9},
    "adam": {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    "rmsprop": {"lr": 0.1, "weight_decay": 0.1},
    "adagrad": {"lr": 0.1, "weight_decay": 0.1},
}


def test_a_thread_pool_reads_and_copies_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pscommon.system.thread_team.PART_BYTES", 64)
    store = Shards(SPEC, 1, ThreadTeam(3)).stores[0]
    for place in range(107):
        buffer = torch.zeros(BUFFER // 4)
        # padding follows the first tensor
        buffer[place if place < 100 else place + 12] = float("nan")
        assert (
            store.find_non_finite(
                store.stage_worker_buffer(WorkerBuffer(buffer.view(torch.uint8)), [])
            )
            == f"t{int(place >= 100)}"
        )
    push, pulled = (torch.randint(0, 60, (BUFFER,), dtype=torch.uint8) for _ in range(2))
    store.set_initial_weights(store.stage_worker_buffer(WorkerBuffer(push), [], initial=True))
    assert store.copy_to(WorkerBuffer(pulled)) == BUFFER
    assert torch.equal(pulled, push)


@pytest.mark.parametrize("pushes", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_never_writes_to_a_workers_gradients(name: str, pushes: int) -> None:
    spec = model(
        ((100,), "float32"),
        ((7,), "float32"),
        ((5,), "float32", "buffer"),
        optimizer=OptimizerSettings(name, (OPTIMIZERS[name],)),
    )
    store: ParameterStore = begun(spec).stores[0]
    buffers = [torch.randint(0, 60, (BUFFER,), dtype=torch.uint8) for _ in range(pushes)]
    before = [buffer.clone() for buffer in buffers]
    for _ in range(3):
        stagings = [store.stage_worker_buffer(WorkerBuffer(buffer), []) for buffer in buffers]
        store.apply(stagings, [1] * pushes)
        for staging in stagings:
            store.release(staging)

    assert all(torch.equal(buffer, copies) for buffer, copies in zip(buffers, before, strict=True))
    assert not any(
        staging.memory is not None and staging.memory["trainable"].data_ptr() == buffer.data_ptr()
        for buffer in buffers
        for staging in [store.allocate_staging()]
    )
