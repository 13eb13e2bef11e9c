"""The worker's shared buffers. The servers are a transport that attaches here, or refuses."""

import logging
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import FencedError, InvalidRequestError, UnreachableError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import PartitionPlan
from pscommon.system.shared_memory import (
    FOLDER,
    AttachedRegion,
    MemoryOffer,
    NotSharedError,
    attach,
)
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.membership import WorkerMembership
from psworker.exchange.shared_buffers import LANES, ClientBuffers
from psworker.exchange.transfer import ShardTransfer

TENSORS = (TensorSpec("w", (5000,), "float32"), TensorSpec("mean", (900,), "float32", "buffer"))
PLAN = PartitionPlan(ModelSpec(TENSORS, OptimizerSettings("sgd")), 2)
PLACE = WorkerMembership("job-1", 7)

Hook = Callable[[], None]


class Servers:
    """Two of them; `before` is called in place of shard 1's answer when it is asked next, and
    may raise.
    """

    def __init__(self) -> None:
        self.addresses = ["shard 0", "shard 1"]
        self.requests: list[tuple[int, ps.AttachMemoryRequest]] = []
        self.modes: list[int] = []
        self.memory: dict[int, AttachedRegion] = {}
        self.refuses: dict[int, str] = {}
        self.before: Hook = lambda: None

    def attach(
        self, shard: int, request: ps.AttachMemoryRequest, timeout: float
    ) -> ps.AttachMemoryResponse:
        self.requests.append((shard, request))
        self.modes.append(stat.S_IMODE((FOLDER / request.name).stat().st_mode))
        if shard == 1:
            self.before()
        if shard in self.refuses:
            return ps.AttachMemoryResponse(reason=self.refuses[shard])
        self.memory[shard] = attach(MemoryOffer(request.name, request.token, request.nbytes))
        return ps.AttachMemoryResponse(attached=True)

    def tape(self, shard: int, half: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """As the server sees it: 0 the gradients, 1 the weights."""
        return np.frombuffer(self.memory[shard].memory, np.uint8)[half * PLAN.nbytes :][
            : PLAN.nbytes
        ]


def offered(lanes: Any = "auto", **refuses: str) -> tuple[ClientBuffers, Any]:
    servers: Any = Servers()
    servers.refuses = {int(shard[1:]): reason for shard, reason in refuses.items()}
    tapes = LANES[lanes](PLAN.nbytes)
    tapes.gradients[:4], tapes.weights[:4] = b"grad", b"weig"
    tapes.offer(servers, PLACE, 5.0)
    return tapes, servers


def finished(lost: Collection[int]) -> Any:
    """Exchanges with both shards; those in `lost` did not know the shared memory."""
    return [SimpleNamespace(version=1, lost_memory=shard in lost) for shard in range(2)]


def files(servers: Servers) -> list[Path]:
    return [
        FOLDER / request.name for _, request in servers.requests if (FOLDER / request.name).exists()
    ]


def test_offer_is_one_file_that_is_ours_alone_and_has_no_name_afterwards() -> None:
    tapes, servers = offered()

    assert [shard for shard, _ in servers.requests] == [0, 1]
    assert {(r.job, r.worker, r.memory, r.nbytes) for _, r in servers.requests} == {
        ("job-1", 7, 1, 2 * PLAN.nbytes)
    }
    assert servers.modes == [0o600, 0o600]
    assert files(servers) == []
    assert (tapes.number, sorted(tapes.shards)) == (1, [0, 1])


def test_servers_see_what_was_there_and_what_comes() -> None:
    tapes, servers = offered()
    tapes.gradients[4:8], servers.tape(1, 1)[8] = b"ient", 99

    assert bytes(servers.tape(0, 0)[:8]) == b"gradient"
    assert bytes(servers.tape(1, 1)[:4]) == b"weig"
    assert tapes.weights[8] == 99


def test_offer_that_stands_is_not_repeated_and_one_that_was_ended_is() -> None:
    tapes, servers = offered()
    tapes.offer(servers, PLACE, 5.0)
    assert len(servers.requests) == 2
    old = servers.tape(0, 0)
    tapes.detach()
    assert (tapes.number, tapes.shards) == (0, frozenset())
    tapes.gradients[0], old[1] = 1, 2
    assert (old[0], tapes.gradients[1]) == (ord("g"), ord("r"))
    tapes.offer(servers, PLACE, 5.0)

    assert [request.memory for _, request in servers.requests] == [1, 1, 2, 2]
    assert bytes(servers.tape(0, 0)[:4]) == b"\1rad"
    tapes.gradients[0], old[1] = 3, 4
    assert (servers.tape(0, 0)[0], old[0], tapes.gradients[1]) == (3, ord("g"), ord("r"))


def test_used_memory_is_remapped_after_its_release() -> None:
    """Another thread may find that an offer is over while the script writes: what it wrote would
    be lost.
    """
    tapes, servers = offered()
    tapes.pin()

    tapes.detach()
    tapes.offer(servers, PLACE, 5.0)

    tapes.weights[0] = 7
    assert (tapes.number, tapes.shards, len(servers.requests)) == (0, frozenset(), 2)
    assert servers.tape(0, 1)[0] == 7, "it is where it was"
    tapes.unpin()
    tapes.weights[0] = 8
    assert servers.tape(0, 1)[0] == 7
    tapes.offer(servers, PLACE, 5.0)
    assert (tapes.number, len(servers.requests)) == (2, 4)


def test_gradients_that_lie_elsewhere_are_copied_for_the_servers_that_share() -> None:
    tapes, servers = offered(_1="no")
    elsewhere = memoryview(bytearray(range(256)) * (PLAN.nbytes // 256 + 1))[: PLAN.nbytes]
    tapes.gradients[:] = bytes(PLAN.nbytes)
    tapes.copy_in(ShardTransfer(PLAN, elsewhere, None))
    first, second = PLAN.range(0, "trainable"), PLAN.range(1, "trainable")

    assert bytes(servers.tape(0, 0)[first.start : first.stop]) == bytes(
        elsewhere[first.start : first.stop]
    )
    assert not any(servers.tape(0, 0)[second.start : second.stop])


def test_weights_that_belong_elsewhere_are_copied_from_those_that_wrote_them() -> None:
    for lost in ((), (1,)):
        tapes, servers = offered()
        servers.tape(0, 1)[:] = 5
        elsewhere = memoryview(bytearray(b"\1" * PLAN.nbytes))
        tapes.take_weights(ShardTransfer(PLAN, None, elsewhere), finished(lost))

        for shard, value in enumerate((5, 1 if lost else 5)):
            for role in ("trainable", "buffer"):
                span = PLAN.range(shard, role)
                assert set(elsewhere[span.start : span.stop]) == {value}, (shard, role)


def test_own_buffers_are_not_copied() -> None:
    """They would be written while servers read them."""
    tapes, servers = offered()
    servers.tape(0, 1)[:] = 5
    tapes.copy_in(ShardTransfer(PLAN, tapes.gradients, tapes.weights))
    tapes.take_weights(ShardTransfer(PLAN, tapes.gradients, tapes.weights), finished(()))

    assert set(tapes.weights) == {5}
    assert bytes(tapes.gradients[:4]) == b"grad"


def test_server_that_refuses_is_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psworker")
    tapes, servers = offered(_0="not here", _1="nor here")
    for _ in range(3):
        tapes.offer(servers, PLACE, 5.0)

    assert [r.getMessage() for r in caplog.records] == [
        "shared_memory_unavailable reason=shard 0: not here",
    ]
    assert len(servers.requests) == 2
    assert tapes.number == 0


@pytest.mark.parametrize("lanes", ["auto", "shm"])
def test_server_that_does_not_answer_is_asked_again_with_the_next_call(lanes: Any) -> None:
    """It may be starting again. Until then everything goes over gRPC, even where memory is
    demanded.
    """
    servers: Any = Servers()
    tapes = LANES[lanes](PLAN.nbytes)

    def fails() -> None:
        servers.before = lambda: None
        raise UnreachableError("it is starting", "NOT_READY")

    servers.before = fails
    tapes.offer(servers, PLACE, 5.0)
    assert (tapes.number, sorted(tapes.shards)) == (0, [])

    tapes.offer(servers, PLACE, 5.0)

    assert (tapes.number, sorted(tapes.shards)) == (2, [0, 1])
    tapes.gradients[0] = 9
    assert [servers.tape(shard, 0)[0] for shard in (0, 1)] == [9, 9]


def test_an_offer_of_a_worker_that_is_out_is_an_error_and_not_a_reason_for_grpc() -> None:
    servers: Any = Servers()
    tapes = ClientBuffers(PLAN.nbytes)

    def fenced() -> None:
        servers.before = lambda: None
        raise FencedError("its lease ended")

    servers.before = fenced
    with pytest.raises(FencedError):
        tapes.offer(servers, PLACE, 5.0)

    tapes.offer(servers, WorkerMembership("job-1", 8), 5.0)
    assert sorted(tapes.shards) == [0, 1]


def test_demanded_memory_that_one_server_refuses_is_used_by_nobody() -> None:
    with pytest.raises(
        InvalidRequestError, match="`--lanes shm` is not possible: shard 1: no, thanks"
    ):
        offered("shm", _1="no, thanks")
    servers: Any = Servers()
    servers.refuses = {1: "no"}
    tapes = LANES["shm"](PLAN.nbytes)
    with pytest.raises(InvalidRequestError):
        tapes.offer(servers, PLACE, 5.0)
    tapes.gradients[0] = 9

    assert (tapes.number, tapes.shards) == (0, frozenset())
    assert servers.tape(0, 0)[0] == 0


def test_no_offer_where_grpc_is_wanted() -> None:
    tapes, servers = offered("grpc")

    assert (servers.requests, tapes.number) == ([], 0)


def test_interrupted_offer_leaves_no_name_and_the_next_one_works() -> None:
    servers: Any = Servers()
    tapes = ClientBuffers(PLAN.nbytes)

    def interrupt() -> None:
        raise KeyboardInterrupt

    servers.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        tapes.offer(servers, PLACE, 5.0)
    assert files(servers) == []
    assert tapes.number == 0
    servers.before = lambda: None
    tapes.offer(servers, PLACE, 5.0)

    assert (tapes.number, sorted(tapes.shards)) == (2, [0, 1])
    _, request = servers.requests[-1]
    with pytest.raises(NotSharedError, match="No such file"):
        attach(MemoryOffer(request.name, request.token, request.nbytes))


def test_views_outlive_close() -> None:
    tapes, servers = offered()
    view = np.frombuffer(tapes.gradients, np.uint8)
    tapes.close()
    del tapes
    servers.tape(0, 0)[0] = 77

    assert view[0] == 77
