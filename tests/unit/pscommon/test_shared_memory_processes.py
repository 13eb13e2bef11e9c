"""Regions between processes, some of which are killed."""

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pscommon.system.shared_memory import MemoryOffer, SharedRegion, attach, sweep

# Shares 5000 bytes of 7, prints the offer and waits. A fork waits, or closes its copy and exits.
CREATOR = """
import os, sys
from pathlib import Path
from pscommon.system.shared_memory import SharedRegion
region = SharedRegion(5000, Path(sys.argv[1]))
region.memory[:] = b"\\7" * 5000
offer = region.share()
if "hide" in sys.argv:
    region.hide()
if "fork" in sys.argv or "ended" in sys.argv:
    child = os.fork()
    if not child and "ended" in sys.argv:
        region.close()
        del region
        sys.exit()
    if child and "ended" in sys.argv:
        os.waitpid(child, 0)
if "fork" not in sys.argv or child:
    print(offer.name, offer.token.hex(), offer.nbytes, flush=True)
os.read(0, 1)
"""

# reads "index" or "index value", writes the value, and prints the byte at the index
PEER = """
import sys
from pathlib import Path
from pscommon.system.shared_memory import MemoryOffer, attach
offer = MemoryOffer(sys.argv[2], bytes.fromhex(sys.argv[3]), int(sys.argv[4]))
attached = attach(offer, Path(sys.argv[1]))
print("attached", flush=True)
for line in sys.stdin:
    index, *value = map(int, line.split())
    if value:
        attached[index] = value[0]
    print(attached[index], flush=True)
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
def program(text: str, *arguments: str) -> Iterator[Program]:
    command = [sys.executable, "-c", text, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


def offered(creator: Program) -> MemoryOffer:
    name, token, nbytes = creator.ask().split()
    return MemoryOffer(name, bytes.fromhex(token), int(nbytes))


@contextmanager
def peer(offer: MemoryOffer, folder: Path) -> Iterator[Program]:
    with program(PEER, str(folder), offer.name, offer.token.hex(), str(offer.nbytes)) as attached:
        assert attached.ask() == "attached"
        yield attached


def test_two_processes_see_each_other_until_detach(tmp_path: Path) -> None:
    region = SharedRegion(10_000_000, tmp_path)
    region.memory[9_999_999] = 1
    with peer(region.share(), tmp_path) as other:
        region.hide()
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
def test_writes_of_a_fork_are_private(tmp_path: Path, closed: bool) -> None:
    region = SharedRegion(5000, tmp_path)
    region.memory[:] = b"\7" * 5000
    other = attach(region.share(), tmp_path)
    region.hide()
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


def test_forks_of_a_large_region_take_no_memory(tmp_path: Path) -> None:
    region = SharedRegion(64 << 20, tmp_path)
    region.share()
    region.hide()

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


def test_descriptors_are_passed_with_the_region(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    region = SharedRegion(5000, tmp_path)
    for _ in range(3):
        region.share()
        region.hide()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    region.detach()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_creator_killed_before_hide_leaves_a_file_for_sweep(tmp_path: Path) -> None:
    with program(CREATOR, str(tmp_path)) as creator:
        offer = offered(creator)
        attached = attach(offer, tmp_path)
        assert sweep(tmp_path) == []
        creator.kill()

    assert [path.name for path in tmp_path.iterdir()] == [offer.name]
    assert sweep(tmp_path) == [offer.name]
    assert list(tmp_path.iterdir()) == []
    assert attached == b"\7" * 5000  # attached processes keep the memory


def test_a_creator_killed_after_hide_leaves_nothing(tmp_path: Path) -> None:
    with program(CREATOR, str(tmp_path), "hide") as creator:
        offered(creator)
        creator.kill()

    assert list(tmp_path.iterdir()) == []


def test_a_killed_attacher_leaves_nothing_and_harms_no_other(tmp_path: Path) -> None:
    region = SharedRegion(5000, tmp_path)
    with peer(region.share(), tmp_path) as other:
        region.hide()
        assert other.ask("4999 6") == "6"
        other.kill()

    region.memory[0] = 1
    assert (region.memory[0], region.memory[4999]) == (1, 6)
    region.detach()
    assert region.memory[4999] == 6
    region.close()
    assert list(tmp_path.iterdir()) == []


def test_a_fork_that_ends_removes_neither_name_nor_lock(tmp_path: Path) -> None:
    with program(CREATOR, str(tmp_path), "ended") as creator:
        offer = offered(creator)

        assert sweep(tmp_path) == []
        assert attach(offer, tmp_path) == b"\7" * 5000


def test_a_fork_that_lives_keeps_the_file_until_it_ends(tmp_path: Path) -> None:
    with program(CREATOR, str(tmp_path), "fork") as creator:
        offer = offered(creator)
        creator.kill()
        assert sweep(tmp_path) == []

        descriptor = os.open(tmp_path / offer.name, os.O_RDONLY)
        assert creator.process.stdin is not None
        creator.process.stdin.close()  # the fork reads EOF and exits
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)
        assert sweep(tmp_path) == [offer.name]


def test_a_script_that_ends_without_closing_leaves_nothing(tmp_path: Path) -> None:
    with program(CREATOR, str(tmp_path)) as creator:
        offered(creator)
        assert creator.process.stdin is not None
        creator.process.stdin.close()
        assert creator.process.wait(30) == 0

    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_only_own_files(tmp_path: Path) -> None:
    ours = "paramserver-" + "0" * 32
    names = ["paramserver-", f"{ours}0", "paramserver-" + "g" * 32, "other"]
    for name in [*names, ours]:
        (tmp_path / name).write_text("")
    (tmp_path / ("paramserver-" + "1" * 32)).mkdir()
    (tmp_path / ("paramserver-" + "2" * 32)).symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / ("paramserver-" + "3" * 32))

    assert sweep(tmp_path) == [ours]
    assert len(list(tmp_path.iterdir())) == len(names) + 3


@pytest.mark.parametrize("holds", [False, True])
def test_sweep_may_run_before_the_creator_has_its_lock(
    holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs between open and flock, and has finished or still runs when the creator locks."""
    region, real = SharedRegion(100, tmp_path), fcntl.flock
    victims: list[Path] = []
    sizes: list[int] = []

    def sweep_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        victims.extend(tmp_path.iterdir())
        if holds:
            sizes.append(os.open(victims[0], os.O_RDONLY))
            real(sizes[0], fcntl.LOCK_EX)
        else:
            assert sweep(tmp_path) == [victims[0].name]
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    offer = region.share()
    for descriptor in sizes:
        os.close(descriptor)
    assert [path.name for path in tmp_path.iterdir()] == [offer.name] != [victims[0].name]
    assert sweep(tmp_path) == []
    attach(offer, tmp_path)[0] = 2
    assert region.memory[0] == 2
    region.close()
    gc.collect()
