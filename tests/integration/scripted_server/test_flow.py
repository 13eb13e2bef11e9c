"""ModelExchange.begin against failing servers: what is sent and received when, and how it ends."""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import FencedError, PSError, UnreachableError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import OptimizerSettings
from pscommon.system.shared_memory import SharedRegion
from psproto.v1 import parameter_server_pb2 as ps
from psworker.client.client import Client
from psworker.core.clock import Clock
from psworker.exchange.open_push import BufferedPush, OpenPush
from tests.support.fake_job import lost
from tests.support.fake_server import FakeCluster, FakeServer

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
SIZE = 2_000_000
"""Of float32: 4 frames a shard."""


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2) as cluster:
        yield cluster


def connect(
    cluster: FakeCluster,
    connect_timeout: float = 20.0,
    wait_timeout: float = 20.0,
    size: int = SIZE,
) -> Client:
    client = Client(cluster.addresses, connect_timeout=connect_timeout, wait_timeout=wait_timeout)
    client.register({"w": np.ones(size, np.float32)}, SGD)
    numbers(client)[0][:] = 2.0
    return client


def numbers(client: Client) -> tuple[Any, Any]:
    gradients, weights = client.model.flat_buffers()
    return np.frombuffer(gradients, np.float32), np.frombuffer(weights, np.float32)


def begun(cluster: FakeCluster, client: Client) -> OpenPush:
    """Return a push whose calls are open on all shards."""
    opened = [threading.Event() for _ in cluster.servers]
    for shard, event in enumerate(opened):
        cluster.before[shard].appendleft(event.set)
    flow = client.model.begin()
    assert isinstance(flow, OpenPush)
    assert all(event.wait(20) for event in opened)
    return flow


def pushes(cluster: FakeCluster) -> list[ps.PushPullHeader]:
    return [header for header in cluster.received if header.seq]


class FrameGate:
    """A hook before each frame that blocks from frame `first` on; `reached` is set when it does."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, number: int) -> None:
        if number >= self.first:
            self.reached.set()
            assert self.open.wait(20)


def cut_at(frame: int) -> Callable[[int], None]:
    """Return a hook that breaks the connection once, before this frame."""
    hooks = deque([lost])

    def hook(number: int) -> None:
        if number == frame and hooks:
            hooks.popleft()()

    return hook


def finished(flow: OpenPush | BufferedPush, client: Client) -> str:
    result = flow.finish()
    flow.wait(0, client.plan.nbytes)
    flow.close()
    return result.status


# ---- sending and receiving -----------------------------------------------------------------------


def test_pieces_are_sent_before_the_push_is_finished(cluster: FakeCluster) -> None:
    arrived = threading.Event()
    cluster.incoming[1] = lambda number: arrived.set()
    with connect(cluster) as client:
        arrived.clear()
        flow = begun(cluster, client)
        second = client.plan.range(1, "trainable")
        flow.send(second.start, second.start + 4)

        assert arrived.wait(20)
        assert finished(flow, client) == "applied"
        assert (numbers(client)[1] == 0).all()


def test_finish_sends_only_the_remaining_bytes(cluster: FakeCluster) -> None:
    seen: dict[int, int] = {}
    with connect(cluster) as client:
        for shard in range(2):
            cluster.incoming[shard] = lambda number, shard=shard: seen.update({shard: number + 1})  # type: ignore[misc]
        flow = begun(cluster, client)
        span = client.plan.range(0, "trainable")
        flow.send(span.start, span.stop - 4)
        assert finished(flow, client) == "applied"

    assert seen == {0: 4 + 1 + 1, 1: 4 + 1}, "frames of data, and the closing header"


def test_wait_returns_as_soon_as_its_bytes_have_arrived(cluster: FakeCluster) -> None:
    """Later frames of shard 0 are blocked; shard 1 is fast."""
    gate = cluster.outgoing[0] = FrameGate(2)
    with connect_open(cluster, gate) as client:
        flow = begun(cluster, client)
        weights, (first, second) = (
            numbers(client)[1],
            (client.plan.range(shard, "trainable") for shard in range(2)),
        )
        weights[:] = 9.0
        assert flow.finish().status == "applied"
        assert gate.reached.wait(20)
        early = first.start, first.start + (2 << 20)
        flow.wait(*early)
        flow.wait(second.start, second.stop)
        late = threading.Thread(target=flow.wait, args=(early[0], early[1] + 4))
        late.start()

        assert (weights[early[0] // 4 : early[1] // 4] == 0).all()
        assert (weights[second.start // 4 : second.stop // 4] == 0).all()
        assert (weights[early[1] // 4 : first.stop // 4] == 9).all()
        late.join(0.3)
        assert late.is_alive()
        gate.open.set()
        late.join(20)
        assert weights[early[1] // 4] == 0
        flow.close()
        assert (weights == 0).all()


def connect_open(cluster: FakeCluster, gate: FrameGate) -> Client:
    """Register while the gate is open."""
    first, gate.first = gate.first, 1 << 30
    client = connect(cluster)
    gate.first = first
    return client


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.every(4)
@pytest.mark.parametrize("shards", [[0], [1], [0, 1]])
@pytest.mark.parametrize("frame", [0, 2, 4])
def test_a_connection_cut_while_sending_repeats_the_push(
    frame: int, shards: list[int], cluster: FakeCluster
) -> None:
    """Frame 4 is the closing header. Everything is sent again, and counts once."""
    with connect(cluster) as client:
        for shard in shards:
            cluster.incoming[shard] = cut_at(frame)
        flow = begun(cluster, client)
        flow.send(0, client.plan.nbytes)

        assert finished(flow, client) == "applied"
        assert (numbers(client)[1] == 0).all()
        assert client.version == 1
        assert isinstance(client.model.begin(), OpenPush)
    assert cluster.counted == [(1, 1)]


@pytest.mark.parametrize("frame", [0, 2])
def test_a_connection_cut_while_receiving_repeats_the_pull(
    frame: int, cluster: FakeCluster
) -> None:
    """finish has returned the outcome; wait waits for the second attempt."""
    with connect(cluster) as client:
        cluster.outgoing[1] = cut_at(frame)

        assert finished(begun(cluster, client), client) == "applied"
        assert (numbers(client)[1] == 0).all()
    assert cluster.counted == [(1, 1)]


def test_repeatedly_lost_answers_count_the_batches_once(cluster: FakeCluster) -> None:
    """A shard without bytes of the push repeats only a header."""
    with connect(cluster) as client:
        for shard in range(2):
            cluster.after[shard].extend([lost] * 3)
        flow = begun(cluster, client)
        result = flow.finish(absent=[0], batches=[BatchKey(1, 7)])
        flow.close()

        assert result.status == "applied"
    last = pushes(cluster)[-1]
    assert [(batch.loop, batch.number) for batch in last.batches] == [(1, 7)]
    assert list(last.absent) == [0]


def release_when_asked(cluster: FakeCluster) -> None:
    cluster.wait_until(lambda: len(pushes(cluster)) > 3)
    cluster.release()


@pytest.mark.parametrize("cut", [False, True])
def test_hours_of_computing_are_neither_silence_nor_waiting(
    cut: bool, cluster: FakeCluster
) -> None:
    """The timeout of a server starts when the push is finished, not when it began."""
    with connect(cluster, connect_timeout=5.0, wait_timeout=5.0) as client:
        clock = client._connection.transport.clock
        hours = [0.0]
        client._connection.transport.clock = Clock(lambda: clock.now() + hours[0], clock.sleep)
        if cut:
            cluster.incoming[0] = cut_at(4)
        flow = begun(cluster, client)
        flow.send(0, client.plan.nbytes)
        hours[0] = 3600.0
        cluster.waits_for = "worker 2"
        timer = threading.Thread(target=release_when_asked, args=(cluster,))
        timer.start()

        assert finished(flow, client) == "applied"
        timer.join(20)
    assert cluster.counted == [(1, 1)]


def test_finish_raises_without_answers_and_the_next_push_is_complete(cluster: FakeCluster) -> None:
    """The outcome is unknown, so the next push needs another number."""
    with connect(cluster, connect_timeout=0.3) as client:
        flow = begun(cluster, client)
        cluster.incoming[1] = lambda number: lost()
        with pytest.raises(UnreachableError):
            flow.finish()
        with pytest.raises(UnreachableError):
            flow.wait(0, 4)
        flow.close()
        cluster.incoming.clear()

        assert isinstance(push := client.model.begin(), BufferedPush)
        assert finished(push, client) == "applied"
        assert (numbers(client)[1] == 0).all()
        assert finished(begun(cluster, client), client) == "applied"
    assert cluster.counted == [(1, 2), (1, 3)]


def test_memory_is_mapped_again_only_by_the_thread_of_the_script(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remapping by another thread would lose what the script writes meanwhile."""
    threads: list[str] = []
    monkeypatch.setattr(
        SharedRegion, "detach", lambda region: threads.append(threading.current_thread().name)
    )
    with connect(cluster, connect_timeout=0.3) as client:
        flow = begun(cluster, client)
        threads.clear()
        cluster.incoming[1] = lambda number: lost()
        with pytest.raises(UnreachableError):
            flow.finish()
        flow.close()
        flow.close()
        cluster.incoming.clear()

    assert threads[:1] == [threading.current_thread().name]
    assert set(threads) == set(threads[:1])


def test_an_early_failure_is_raised_by_finish(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        flow = begun(cluster, client)
        cluster.fenced.add(client.worker)
        flow.send(0, 4)
        with pytest.raises(FencedError):
            flow.finish()
        flow.close()
        with pytest.raises(FencedError):
            finished(client.model.begin(), client)


def test_begin_on_a_fenced_client_does_not_stay_open(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        client.leave()
        for _ in range(2):
            flow = client.model.begin()
            with pytest.raises(PSError, match="this Client has left the job"):
                flow.finish()
            flow.close()


def test_ctrl_c_in_finish_ends_the_calls(cluster: FakeCluster) -> None:
    """close does not wait for the others of the round."""
    cluster.waits_for = "worker 2"
    with connect(cluster) as client:
        flow = begun(cluster, client)

        def interrupt() -> None:
            cluster.wait_until(lambda: len(pushes(cluster)) > 3)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            flow.finish()
        thread.join(20)
        flow.close()
        with pytest.raises(KeyboardInterrupt):  # not a timeout of the round
            flow.wait(0, 4)
        cluster.release()

        assert isinstance(client.model.begin(), BufferedPush)


def test_a_client_with_an_open_push_can_be_closed(cluster: FakeCluster) -> None:
    client = connect(cluster)
    begun(cluster, client).send(0, 4)
    client.close()

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("psworker")]
    assert not cluster.counted


def test_a_server_restarted_in_the_middle_gets_the_whole_push(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        flow = begun(cluster, client)
        flow.send(0, client.plan.nbytes)
        old = cluster.servers[1]
        old.stop()
        cluster.servers[1] = FakeServer(cluster, 1, True, bind=old.address)

        assert finished(flow, client) == "applied"
        assert (numbers(client)[1] == 0).all()
    assert cluster.counted == [(1, 1)]


# ---- small pushes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "kind"), [(500_000, "ExchangeOnce"), (600_000, "Exchange")])
def test_a_small_push_is_one_message(size: int, kind: str) -> None:
    """A frame holds 1 MiB. Both ways of sending give the same."""
    other = {"ExchangeOnce": "Exchange", "Exchange": "ExchangeOnce"}[kind]
    with FakeCluster() as cluster:
        with connect(cluster, size=size // 2) as client:
            assert (cluster.calls["Exchange"] > 0) is (kind == "Exchange")
            cluster.calls.clear()
            gradient = {"w": np.arange(size // 2, dtype=np.float32)}
            assert client.push(gradient).status == "applied"
            assert np.array_equal(client.pull()["w"], 1 - gradient["w"] / 2)
            assert client.push_pull(gradient).status == "applied"
            assert np.array_equal(client.weights["w"], 1 - gradient["w"])
        assert cluster.calls[kind] == 3
        assert not cluster.calls[other]
