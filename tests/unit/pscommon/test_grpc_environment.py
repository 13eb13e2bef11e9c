"""Variables that pscommon sets for gRPC, by their effect on the threads of a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pscommon.wire.endpoint import Endpoint, open_channel

CALLS = 200

# pscommon.wire.endpoint is the first module here that imports gRPC
SERVER = """
import sys
from pscommon.wire.endpoint import Endpoint, listen_grpc
import grpc

server, address = listen_grpc(Endpoint("127.0.0.1:0"), 2)
echo = grpc.unary_unary_rpc_method_handler(lambda message, context: message)
handler = grpc.method_handlers_generic_handler("test.Test", {"Echo": echo})
server.add_generic_rpc_handlers((handler,))
server.start()
print(address, flush=True)
sys.stdin.read()
server.stop(None).wait()
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs Linux: looks at threads in /proc"
)


def event_engine_wakeups(pid: int) -> int:
    """Return how often the threads of gRPC's event engine have waited."""
    tasks = [
        task
        for task in Path(f"/proc/{pid}/task").iterdir()
        if "event_engine" in (task / "comm").read_text()
    ]
    return sum(
        int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        for task in tasks
    )


def wakeups_by_calls(**environment: str) -> int:
    unchanged = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=unchanged | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        with open_channel(Endpoint(server.stdout.readline().strip())) as channel:
            call = channel.unary_unary("/test.Test/Echo")
            call(b"first", timeout=10)
            before = event_engine_wakeups(server.pid)
            for _ in range(CALLS):
                assert call(b"again", timeout=10) == b"again"
            found = event_engine_wakeups(server.pid) - before
        _, errors = server.communicate(timeout=20)
        assert (server.returncode, errors) == (0, "")
    return found


def test_messages_pass_through_no_extra_thread_of_the_server() -> None:
    assert wakeups_by_calls() < CALLS / 2


def test_variables_of_the_user_are_unchanged() -> None:
    assert wakeups_by_calls(GRPC_EXPERIMENTS="") > CALLS / 2
