"""The worker's shared buffers, with fake servers that attach or refuse the memory."""

import logging
import os
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import FencedError, InvalidRequestError, UnreachableError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import PartitionPlan
from pscommon.system.shared_memory import attach
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.membership import WorkerMembership
from psworker.exchange.client_buffers import LANES, ClientBuffers
from psworker.exchange.transfer import ShardTransfer

TENSORS = (TensorSpec("w", (5000,), "float32"), TensorSpec("mean", (900,), "float32", "buffer"))
PLAN = PartitionPlan(ModelSpec(TENSORS, OptimizerSettings("sgd")), 2)
PLACE = WorkerMembership("job-1", 7)

Hook = Callable[[], None]


class Servers:
    """Fake transport to two servers. before: called before shard 1 answers; it may raise."""

    def __init__(self) -> None:
        self.addresses = ["shard 0", "shard 1"]
        self.requests: list[tuple[int, ps.PushPullHeader]] = []
        self.memory: dict[int, memoryview] = {}
        self.refuses: dict[int, str] = {}
        self.before: Hook = lambda: None

    def offer_memory(
        self, shard: int, header: ps.PushPullHeader, share: Callable[[], int], timeout: float
    ) -> None:
        sent = ps.PushPullHeader()
        sent.CopyFrom(header)
        self.requests.append((shard, sent))
        if shard == 1:
            self.before()
        if shard in self.refuses:
            raise InvalidRequestError(self.refuses[shard])
        self.memory[shard] = attach(share(), 2 * PLAN.nbytes)

    def memory_half(self, shard: int, half: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return half 0 (gradients) or 1 (weights) of the memory that the server has attached."""
        return np.frombuffer(self.memory[shard], np.uint8)[half * PLAN.nbytes :][: PLAN.nbytes]


def offered(lanes: Any = "auto", **refuses: str) -> tuple[ClientBuffers, Any]:
    servers: Any = Servers()
    servers.refuses = {int(shard[1:]): reason for shard, reason in refuses.items()}
    buffers = LANES[lanes](PLAN.nbytes)
    buffers.gradients[:4], buffers.weights[:4] = b"grad", b"weig"
    buffers.offer(servers, PLACE, 5.0)
    return buffers, servers


def finished(lost: Collection[int]) -> Any:
    """Return exchanges with both shards; those in `lost` have lost the shared memory."""
    return [SimpleNamespace(version=1, lost_memory=shard in lost) for shard in range(2)]


def test_an_offer_is_one_region_for_all_servers() -> None:
    buffers, servers = offered()

    assert [shard for shard, _ in servers.requests] == [0, 1]
    assert {(r.job, r.worker, r.memory) for _, r in servers.requests} == {("job-1", 7, 1)}
    servers.memory[0][0] = 5
    assert servers.memory[1][0] == 5
    assert (buffers.number, sorted(buffers.shards)) == (1, [0, 1])


def test_servers_see_earlier_and_later_bytes() -> None:
    buffers, servers = offered()
    buffers.gradients[4:8], servers.memory_half(1, 1)[8] = b"ient", 99

    assert bytes(servers.memory_half(0, 0)[:8]) == b"gradient"
    assert bytes(servers.memory_half(1, 1)[:4]) == b"weig"
    assert buffers.weights[8] == 99


def test_an_offer_is_repeated_only_after_detach() -> None:
    buffers, servers = offered()
    buffers.offer(servers, PLACE, 5.0)
    assert len(servers.requests) == 2
    old = servers.memory_half(0, 0)
    buffers.detach()
    assert (buffers.number, buffers.shards) == (0, frozenset())
    buffers.gradients[0], old[1] = 1, 2
    assert (old[0], buffers.gradients[1]) == (ord("g"), ord("r"))
    buffers.offer(servers, PLACE, 5.0)

    assert [request.memory for _, request in servers.requests] == [1, 1, 2, 2]
    assert bytes(servers.memory_half(0, 0)[:4]) == b"\1rad"
    buffers.gradients[0], old[1] = 3, 4
    assert (servers.memory_half(0, 0)[0], old[0], buffers.gradients[1]) == (3, ord("g"), ord("r"))


def test_used_memory_is_remapped_after_its_release() -> None:
    """Another thread may end an offer while the script writes; these bytes would be lost."""
    buffers, servers = offered()
    buffers.pin()

    buffers.detach()
    buffers.offer(servers, PLACE, 5.0)

    buffers.weights[0] = 7
    assert (buffers.number, buffers.shards, len(servers.requests)) == (0, frozenset(), 2)
    assert servers.memory_half(0, 1)[0] == 7, "the memory is still shared"
    buffers.unpin()
    buffers.weights[0] = 8
    assert servers.memory_half(0, 1)[0] == 7
    buffers.offer(servers, PLACE, 5.0)
    assert (buffers.number, len(servers.requests)) == (2, 4)


def test_other_gradients_are_copied_for_servers_with_shared_memory() -> None:
    buffers, servers = offered(_1="no")
    elsewhere = memoryview(bytearray(range(256)) * (PLAN.nbytes // 256 + 1))[: PLAN.nbytes]
    buffers.gradients[:] = bytes(PLAN.nbytes)
    buffers.copy_in(ShardTransfer(PLAN, elsewhere, None))
    first, second = PLAN.range(0, "trainable"), PLAN.range(1, "trainable")

    assert bytes(servers.memory_half(0, 0)[first.start : first.stop]) == bytes(
        elsewhere[first.start : first.stop]
    )
    assert not any(servers.memory_half(0, 0)[second.start : second.stop])


def test_weights_are_copied_to_other_memory_from_servers_with_shared_memory() -> None:
    for lost in ((), (1,)):
        buffers, servers = offered()
        servers.memory_half(0, 1)[:] = 5
        elsewhere = memoryview(bytearray(b"\1" * PLAN.nbytes))
        buffers.take_weights(ShardTransfer(PLAN, None, elsewhere), finished(lost))

        for shard, value in enumerate((5, 1 if lost else 5)):
            for role in ("trainable", "buffer"):
                span = PLAN.range(shard, role)
                assert set(elsewhere[span.start : span.stop]) == {value}, (shard, role)


def test_own_buffers_are_not_copied() -> None:
    """They would be written while servers read them."""
    buffers, servers = offered()
    servers.memory_half(0, 1)[:] = 5
    buffers.copy_in(ShardTransfer(PLAN, buffers.gradients, buffers.weights))
    buffers.take_weights(ShardTransfer(PLAN, buffers.gradients, buffers.weights), finished(()))

    assert set(buffers.weights) == {5}
    assert bytes(buffers.gradients[:4]) == b"grad"


def test_refusals_are_logged_once_with_the_first_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psworker")
    buffers, servers = offered(_0="not here", _1="nor here")
    for _ in range(3):
        buffers.offer(servers, PLACE, 5.0)

    assert [r.getMessage() for r in caplog.records] == [
        "shared_memory_unavailable reason=shard 0: not here",
    ]
    assert len(servers.requests) == 2
    assert buffers.number == 0


@pytest.mark.parametrize("lanes", ["auto", "shm"])
def test_an_unanswered_offer_is_repeated_at_the_next_call(lanes: Any) -> None:
    """The server may be restarting. Until then all bytes go over gRPC, even with --lanes shm."""
    servers: Any = Servers()
    buffers = LANES[lanes](PLAN.nbytes)

    def fails() -> None:
        servers.before = lambda: None
        raise UnreachableError("it is starting", "NOT_READY")

    servers.before = fails
    buffers.offer(servers, PLACE, 5.0)
    assert (buffers.number, sorted(buffers.shards)) == (0, [])

    buffers.offer(servers, PLACE, 5.0)

    assert (buffers.number, sorted(buffers.shards)) == (2, [0, 1])
    buffers.gradients[0] = 9
    assert [servers.memory_half(shard, 0)[0] for shard in (0, 1)] == [9, 9]


def test_an_offer_of_a_fenced_worker_raises() -> None:
    servers: Any = Servers()
    buffers = ClientBuffers(PLAN.nbytes)

    def fenced() -> None:
        servers.before = lambda: None
        raise FencedError("its lease ended")

    servers.before = fenced
    with pytest.raises(FencedError):
        buffers.offer(servers, PLACE, 5.0)

    buffers.offer(servers, WorkerMembership("job-1", 8), 5.0)
    assert sorted(buffers.shards) == [0, 1]


def test_mandatory_memory_refused_by_one_server_is_not_used_by_any() -> None:
    with pytest.raises(
        InvalidRequestError, match="`--lanes shm` is not possible: shard 1: no, thanks"
    ):
        offered("shm", _1="no, thanks")
    servers: Any = Servers()
    servers.refuses = {1: "no"}
    buffers = LANES["shm"](PLAN.nbytes)
    with pytest.raises(InvalidRequestError):
        buffers.offer(servers, PLACE, 5.0)
    buffers.gradients[0] = 9

    assert (buffers.number, buffers.shards) == (0, frozenset())
    assert servers.memory_half(0, 0)[0] == 0


def test_lanes_grpc_makes_no_offer() -> None:
    buffers, servers = offered("grpc")

    assert (servers.requests, buffers.number) == ([], 0)


def test_a_system_without_memfd_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    caplog.set_level(logging.INFO, "psworker")
    monkeypatch.setattr(os, "memfd_create", refuse)
    buffers, servers = offered()
    buffers.offer(servers, PLACE, 5.0)

    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("shared_memory_unavailable reason=cannot share")
    assert (len(servers.requests), buffers.number) == (1, 0)


def test_an_interrupted_offer_can_be_repeated() -> None:
    servers: Any = Servers()
    buffers = ClientBuffers(PLAN.nbytes)

    def interrupt() -> None:
        raise KeyboardInterrupt

    servers.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        buffers.offer(servers, PLACE, 5.0)
    assert buffers.number == 0
    first = servers.memory[0]
    servers.before = lambda: None
    buffers.offer(servers, PLACE, 5.0)

    assert (buffers.number, sorted(buffers.shards)) == (2, [0, 1])
    first[0] = 200
    assert buffers.gradients[0] == 0


def test_views_outlive_the_buffers() -> None:
    buffers, servers = offered()
    view = np.frombuffer(buffers.gradients, np.uint8)
    del buffers
    servers.memory_half(0, 0)[0] = 77

    assert view[0] == 77
