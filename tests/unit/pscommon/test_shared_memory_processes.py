"""Regions between processes, some of which are killed."""

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pscommon.system.shared_memory import SharedRegion, attach
from tests.support.shared_memory import mapped_count

# reads "index" or "index value", writes the value, and prints the byte at the index
PEER = """
import sys
from pscommon.system.shared_memory import attach
attached = attach(int(sys.argv[1]), int(sys.argv[2]))
print("attached", flush=True)
for line in sys.stdin:
    index, *value = map(int, line.split())
    if value:
        attached[index] = value[0]
    print(attached[index], flush=True)
"""

# shares 5000 bytes of 7, sends the descriptor over a Unix socket and waits
CREATOR = """
import os, socket, sys
from pscommon.system.shared_memory import SharedRegion
region = SharedRegion(5000)
region.memory[:] = b"\\7" * 5000
with socket.socket(fileno=int(sys.argv[1])) as sock:
    socket.send_fds(sock, [b"x"], [region.share()])
os.read(0, 1)
"""


class Program:
    """A process that answers lines."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def ask(self, line: str = "") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@contextmanager
def program(text: str, descriptor: int, *arguments: object) -> Iterator[Program]:
    """Start a program that inherits a descriptor, whose number is its first argument."""
    command = [sys.executable, "-c", text, str(descriptor), *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[descriptor],
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


@contextmanager
def peer(region: SharedRegion) -> Iterator[Program]:
    with program(PEER, region.share(), region.nbytes) as attached:
        assert attached.ask() == "attached"
        yield attached


def test_two_processes_see_each_other_until_detach() -> None:
    region = SharedRegion(10_000_000)
    region.memory[9_999_999] = 1
    with peer(region) as other:
        assert other.ask("9999999") == "1"
        region.memory[5_000_000] = 2
        assert other.ask("5000000") == "2"
        assert other.ask("0 3") == "3"
        assert region.memory[0] == 3

        region.detach()
        assert other.ask("0 4") == "4"
        assert region.memory[0] == 3
        region.memory[1] = 5
        assert other.ask("1") == "0"
    region.close()


def in_fork(body: Callable[[], bool]) -> bool:
    """Return the result of an action in a fork of this process."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if body() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("closed", [False, True])
def test_writes_of_a_fork_are_private(closed: bool) -> None:
    region = SharedRegion(5000)
    region.memory[:] = b"\7" * 5000
    other = attach(region.share(), 5000)
    memory = region.memory
    if closed:
        region.close()

    def writes() -> bool:
        was = memory[0]
        memory[0] = 1
        grandchild = in_fork(lambda: memory[0] == 1)
        return grandchild and (was, memory[0], memory[4999]) == (7, 1, 7)

    assert in_fork(writes)
    assert memory[0] == other[0] == 7
    memory[1] = 8
    assert other[1] == 8, "it is shared as before"


def test_forks_of_a_large_region_take_no_memory() -> None:
    region = SharedRegion(64 << 20)
    region.share()

    def own() -> int:
        """Return the private bytes in this process's mappings of files."""
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return (
            sum(
                int(line.split()[1])
                for line in rollup.splitlines()
                if line.startswith("Private_Dirty:")
            )
            << 10
        )

    assert in_fork(lambda: bool(region.memory[1 << 20] == 0) and own() < 48 << 20)


def test_a_fork_has_no_descriptor_of_shared_memory() -> None:
    region = SharedRegion(5000)
    descriptor = region.share()

    def is_closed() -> bool:
        try:
            os.fstat(descriptor)
        except OSError:
            return True
        return False

    assert in_fork(is_closed)
    assert os.fstat(descriptor).st_size == 5000


def test_memory_of_a_killed_creator_stays_until_it_is_unmapped() -> None:
    gc.collect()  # garbage of earlier tests may own some
    before = mapped_count()
    ours, theirs = socket.socketpair()
    with ours, theirs, program(CREATOR, theirs.fileno()) as creator:
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
        attached = attach(descriptor, 5000)
        os.close(descriptor)
        creator.kill()

    assert attached == b"\7" * 5000
    assert mapped_count() == before + 1
    del attached
    assert mapped_count() == before


def test_a_killed_attacher_harms_no_other() -> None:
    region = SharedRegion(5000)
    with peer(region) as other:
        assert other.ask("4999 6") == "6"
        other.kill()

    region.memory[0] = 1
    assert (region.memory[0], region.memory[4999]) == (1, 6)
    region.detach()
    assert region.memory[4999] == 6
    region.close()
