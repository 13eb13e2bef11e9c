"""Clients and their processes: forks, exit without close, Ctrl-C. Each test starts processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psworker.connection.connection import DROPPED, ENDED
from tests.support.fake_server import FakeCluster

ROOT = Path(__file__).parents[2]
START = """
import os, signal, sys, threading
import numpy as np
from pscommon.core.model_spec import OptimizerSettings
from psworker.client.client import Client
client = Client(sys.argv[1].split(","), wait_timeout=60)
params = {"w": np.ones(1000, np.float32)}
client.register(params, OptimizerSettings("sgd", ({"lr": 0.5},)))
"""
FORKS = """
for _ in range(20):
    pid = os.fork()
    if not pid:
        ENDING
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    assert client.push(params).status == "applied"
client.close()
print("done")
"""


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2, lease=0.05) as cluster:
        yield cluster


def start_program(cluster: FakeCluster, program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program, ",".join(cluster.addresses)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'common'}"},
    )


def run_program(
    cluster: FakeCluster, program: str, start_with: str = START
) -> tuple[int, str, str]:
    with start_program(cluster, start_with + program) as process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        return process.returncode, out, err


@pytest.mark.parametrize(
    "ending",
    [
        "os._exit(0)",
        "sys.exit(0)",
        "import gc; del client; gc.collect(); os._exit(0)",
        "client.close(); sys.exit(0)",
    ],
)
def test_a_parent_can_push_after_its_forked_child_exits(cluster: FakeCluster, ending: str) -> None:
    code, out, err = run_program(cluster, FORKS.replace("ENDING", ending))

    assert (code, out, err) == (0, "done\n", "")
    assert cluster.version == 20
    assert cluster.left == {1: ""}


def test_a_client_inherited_by_a_forked_child_is_refused(cluster: FakeCluster) -> None:
    program = """
if not os.fork():
    try:
        client.push(params)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
client.close()
"""
    code, out, _ = run_program(cluster, program)

    assert code == 0
    assert out.startswith("InvalidRequestError this Client belongs to process")
    assert cluster.version == 0


def test_a_new_client_in_a_forked_child_is_refused(cluster: FakeCluster) -> None:
    """gRPC would sometimes hang or crash there."""
    program = """
if not os.fork():
    try:
        Client(sys.argv[1])
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
client.close()
"""
    code, out, err = run_program(cluster, program)

    assert (code, err) == (0, "")
    assert out.startswith(
        "InvalidRequestError gRPC does not work in a fork of a process that used it"
    )
    assert "spawn" in out


def test_forked_children_can_create_clients_if_the_parent_has_none(cluster: FakeCluster) -> None:
    program = """
import os, sys
from psworker.client.client import Client
for _ in range(2):
    if not os.fork():
        with Client(sys.argv[1]) as client:
            print(client.worker, flush=True)
        os._exit(0)
    os.wait()
"""
    code, out, err = run_program(cluster, program, start_with="")

    assert (code, out, err) == (0, "1\n2\n", "")


@pytest.mark.parametrize("ending", ["", "del client", "sys.exit(3)", "raise KeyError('oops')"])
def test_a_process_exits_with_an_unclosed_client(cluster: FakeCluster, ending: str) -> None:
    code, _, err = run_program(cluster, "client.push(params)\n" + ending)

    assert code == {"sys.exit(3)": 3, "raise KeyError('oops')": 1}.get(ending, 0)
    assert "oops" in err or not err
    assert cluster.left == {1: DROPPED if ending == "del client" else ENDED}


DROPS = """
import gc
gc.disable()
lane = client._connection.transport
client.myself = client  # only the collector finds it
del client
"""


def test_a_client_can_be_garbage_collected_while_a_call_starts(cluster: FakeCluster) -> None:
    """gRPC's core aborts the process if a channel is closed while a call is started on it."""
    program = """
from pscommon.wire.requests import DESCRIBE
from psproto.v1.parameter_server_pb2 import DescribeRequest
describe = lane._channel(lane.addresses[0]).stubs[DESCRIBE]

class Operations(tuple):
    def __iter__(self):  # when the call is there, and nothing has been started on it
        collected.append(gc.collect())
        return super().__iter__()

def managed(
    flags, method, host, deadline, metadata, credentials, operations, *rest,
    start=describe._call._managed_call,
):
    operations = tuple(map(Operations, operations))
    return start(flags, method, host, deadline, metadata, credentials, operations, *rest)

collected, describe._call._managed_call = [], managed
answer = describe.future(DescribeRequest(), timeout=5)
assert any(collected)
"""
    code, _, err = run_program(cluster, DROPS + program)

    assert (code, err) == (0, "")
    assert cluster.left == {1: DROPPED}


def test_a_client_can_be_garbage_collected_while_its_lock_is_taken(cluster: FakeCluster) -> None:
    code, _, err = run_program(cluster, DROPS + "with lane._lock: assert gc.collect()")

    assert (code, err) == (0, "")
    assert cluster.left == {1: DROPPED}


def test_garbage_collected_clients_leave_at_once(cluster: FakeCluster) -> None:
    """They leave before their process exits, and their threads end."""
    program = """
for _ in range(3):
    Client(sys.argv[1])
threads = lambda: [t for t in threading.enumerate() if t.name.startswith("heart")]
while len(threads()) > 1: threading.Event().wait(0.01)
print("ended", flush=True)
sys.stdin.read()
"""
    with start_program(cluster, START + program) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ended\n"
            cluster.wait_until(lambda: cluster.left == {2: DROPPED, 3: DROPPED, 4: DROPPED})
        finally:
            process.kill()


INTERRUPTED = """
try:
    client.push(params)
except KeyboardInterrupt:
    client.close()
    names = {thread.name for thread in threading.enumerate()}
    print("interrupted", {name for name in names if name.startswith(("heart", "psworker"))})
"""


def test_close_does_not_block_after_ctrl_c_during_a_call(
    cluster: FakeCluster,
) -> None:
    """gRPC has started the call but not yet the thread that ends it."""
    cluster.waits_for = "worker 2"
    program = """
import grpc._channel as channel
go_on = channel._run_channel_spin_thread

def interrupted(state):
    if threading.current_thread() is threading.main_thread():
        channel._run_channel_spin_thread = go_on
        os.kill(os.getpid(), signal.SIGINT)
    go_on(state)

channel._run_channel_spin_thread = interrupted
"""
    assert run_program(cluster, program + INTERRUPTED) == (0, "interrupted set()\n", "")
    assert cluster.left == {1: ""}


@pytest.mark.parametrize("shards", [1, 2])
def test_ctrl_c_interrupts_a_waiting_push(shards: int) -> None:
    with (
        FakeCluster(shards=shards, lease=0.05) as cluster,
        start_program(cluster, START + INTERRUPTED) as process,
    ):
        cluster.waits_for = "worker 2"
        try:
            cluster.wait_until(lambda: sum(header.seq for header in cluster.received) > 4)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()

    assert (out, err) == ("interrupted set()\n", "")
    assert cluster.left == {1: ""}


@pytest.mark.parametrize("call", ["push(params)", "status()"])
@pytest.mark.parametrize("shards", [1, 2])
def test_an_exception_in_a_signal_handler_releases_all_locks(shards: int, call: str) -> None:
    """A time-limit alarm arrives while a lock of gRPC or of this package is being acquired."""
    program = f"""
def late(number, frame):
    raise TimeoutError("late")

def enter(condition, go_on=threading.Condition.__enter__):
    taken = go_on(condition)
    if threading.current_thread() is threading.main_thread():
        threading.Condition.__enter__ = go_on
        signal.raise_signal(signal.SIGALRM)
    return taken

signal.signal(signal.SIGALRM, late)
threading.Condition.__enter__ = enter
try:
    client.{call}
except TimeoutError as error:
    print(error)
assert signal.getsignal(signal.SIGALRM) is late
client.status()
assert client.push(params).status in ("applied", "duplicate")  # the first may have counted
client.close()
"""
    with FakeCluster(shards=shards, lease=0.05) as cluster:
        assert run_program(cluster, program) == (0, "late\n", "")
        assert cluster.left == {1: ""}
        assert cluster.version == 1
