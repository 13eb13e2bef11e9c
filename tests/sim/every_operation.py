"""A short, whole job whose disk goes wrong at its n-th operation, for each n, or whose server
dies there.

The job: a model is registered, pushes of one each with a snapshot after each two, all servers
are started again, more pushes. So logs are begun, appended to, left for the next segment,
retired and read; snapshots are written, pruned and loaded. The servers are direct ones: no
processes.

As a program, each kind of trouble at each operation, and a second death after each first: python
-m tests.sim.every_operation
"""

import logging
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import pytest

import psserver.core.commands.recorder
from pscommon.core.errors import SnapshotError
from pscommon.settings.values import SnapshotEvery
from pscommon.snapshot import SnapshotDirectory
from psworker import Client
from tests.sim.single_thread_servers import DirectServers, Killed
from tests.support import workers
from tests.support.disk_operations import TROUBLES, Act, Operation, Operations
from tests.support.events import event_key
from tests.support.snapshot_files import stored
from tests.support.workers import counted, counter

BEFORE, AFTER, STEPS = 3, 2, 2
"""Pushes before the restart and after it; steps between two snapshots."""
FOR_GOOD = 1 << 30
TICKS = 20
"""In which a disk that works again must have been found out."""
BROKEN = "log_unwritable"
BEGUN = "there is none since version 0"
"""What is said of a log whose server died while it began: of a job without weights."""
ERRNOS = ("ENOSPC", "EIO", "EROFS")
COUNTED = ("open", "write", "save")
"""Operations whose failure always means that something was not written."""
CUT_SHORT = ("write", "save", "overwrite")


class Death:
    """An Act: the server that comes first here dies, and the one that comes `again` operations
    later, if any.
    """

    def __init__(self, servers: DirectServers, again: int = 0) -> None:
        self.deaths = 0
        self._servers = servers
        self._again, self._left = again, 0

    def __call__(
        self, operation: Operation, real: Callable[[], Any], arguments: Sequence[Any]
    ) -> Any:
        life = self._servers.at_work
        if not life.dead and self._left == 0 and self.deaths < (2 if self._again else 1):
            life.dead, self._left = True, self._again
            self.deaths += 1
        elif not life.dead:
            self._left -= 1
        if life.dead:
            raise Killed
        return real()


@contextmanager
def prepared() -> Iterator[list[logging.LogRecord]]:
    """Let broken logs begin again at once. Yield all warnings and errors of the servers."""
    records: list[logging.LogRecord] = []
    handler, log = logging.Handler(logging.ERROR), logging.getLogger("psserver")
    handler.emit = records.append  # type: ignore[method-assign]
    hook = threading.excepthook
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psserver.core.commands.recorder, "LOG_REPAIR_INTERVAL_SECONDS", 0.0)
        # a server may die while its thread writes a snapshot
        patch.setattr(
            threading, "excepthook", lambda args: None if args.exc_type is Killed else hook(args)
        )
        patch.setattr(log, "propagate", False)
        log.addHandler(handler)
        yield records
        log.removeHandler(handler)


def make(folder: Path, durability: str, revive: bool = True) -> DirectServers:
    every = SnapshotEvery(steps=STEPS)
    return DirectServers(
        folder, revive=revive, durability=durability, snapshot_every=every, policy="async"
    )


def worker(servers: DirectServers) -> Client:
    return counter("", lane=servers.lane())


def push(servers: DirectServers, client: Client, steps: int) -> None:
    """And lets snapshots be filed."""
    for _ in range(steps):
        workers.count(client)
        servers.tick()


def newest(folder: Path) -> int:
    """The version of the newest snapshot, 0: there is none. Every snapshot that has a manifest
    is sound.
    """
    snapshots = SnapshotDirectory(folder)
    assert [
        problem for version in snapshots.versions() for problem in snapshots.verify(version)
    ] == []
    return max(snapshots.versions(), default=0)


def check_weights(folder: Path, version: int) -> None:
    """The newest snapshot is not older than this version, and its weights are those of its own."""
    found = newest(folder)
    assert found >= version
    assert counted(stored(folder, found)) == found


def start(servers: DirectServers, disk: Operations) -> None:
    """A server that cannot count its starts does not start; it does when it is tried again
    later.
    """
    try:
        servers.start()
    except SnapshotError:
        servers.close()
        disk.heal()
        servers.start()


def with_whole_logs(servers: DirectServers) -> None:
    """All logs can be recovered again, by themselves."""
    for _ in range(TICKS):
        if not servers.log_broken:
            return
        servers.tick()
    raise AssertionError("a log stays broken")


def restarted(
    servers: DirectServers, disk: Operations, folder: Path, logged: bool, acknowledged: int
) -> int:
    """All servers die and come again: on the version that was acknowledged, or without a log on
    the newest snapshot.
    """
    if logged:
        with_whole_logs(servers)
    wanted = acknowledged if logged else newest(folder)
    servers.close()
    start(servers, disk)
    with worker(servers) as client:
        assert counted(client.pull()) == wanted
    return wanted


# ---- failures ------------------------------------------------------------------------------------


def fails(
    folder: Path, durability: str, number: int, trouble: Act, lasts: bool = False
) -> Operations:
    """The job, with trouble at operation `number`; lasts: at all from there on until the
    restart.
    """
    logged = durability == "log"
    with (
        prepared() as records,
        Operations(number, FOR_GOOD if lasts else number, trouble).installed() as disk,
    ):
        servers = make(folder, durability)
        start(servers, disk)
        with worker(servers) as client:
            push(servers, client, BEFORE)
            assert counted(client.pull()) == BEFORE
            check_records(servers, records)
            if lasts:
                disk.heal()
                push(servers, client, 1)
        version = restarted(servers, disk, folder, logged, BEFORE + lasts)
        with worker(servers) as client:
            push(servers, client, AFTER)
        check_records(servers, records)
        if disk.acted and disk.seen[number - 1].name in COUNTED:
            assert records or servers.refused
        disk.heal()
        version = restarted(servers, disk, folder, logged, version + AFTER)
        with worker(servers) as client:
            push(servers, client, STEPS)
        check_weights(folder, version)
        servers.close()
    return disk


def check_records(servers: DirectServers, records: list[logging.LogRecord]) -> None:
    """One ERROR for each log that could not be written, however often; and it is counted, as
    each snapshot is.
    """
    broken = Counter(record.__dict__["folder"] for record in records if event_key(record) == BROKEN)
    logs, snapshots = (
        sum(life.failures(name) for life in servers.all) for name in ("log", "snapshot")
    )
    assert bool(broken) == bool(logs)
    assert all(times <= len(servers.all) // len(servers.lives) for times in broken.values())
    failures = [record for record in records if event_key(record) == "snapshot_failed"]
    assert bool(failures) == bool(snapshots)


# ---- deaths --------------------------------------------------------------------------------------


def dies(folder: Path, number: int, again: int = 0) -> Operations:
    """With logs: kill the server at operation `number`; its restart changes nothing for others."""
    servers = make(folder, "log")
    with (
        prepared() as records,
        Operations(number, FOR_GOOD, Death(servers, again)).installed() as disk,
    ):
        servers.tick()
        with worker(servers) as client:
            push(servers, client, BEFORE + AFTER)
            assert counted(client.pull()) == BEFORE + AFTER
        disk.heal()
        servers.tick()
        restarted(servers, disk, folder, True, BEFORE + AFTER)
        with worker(servers) as client:
            push(servers, client, STEPS)
        check_weights(folder, BEFORE + AFTER)
        servers.close()
    assert [text for record in records if BEGUN not in (text := str(record.__dict__))] == []
    return disk


def all_die(folder: Path, number: int) -> Operations:
    """With snapshots alone: all servers die at operation `number`, and return to the newest
    snapshot.
    """
    servers = make(folder, "snapshot", revive=False)
    with prepared(), Operations(number, FOR_GOOD, Death(servers)).installed() as disk:
        with suppress(Killed):
            servers.start()
            with worker(servers) as client:
                push(servers, client, BEFORE + AFTER)
        disk.heal()
        servers.close()
        version = restarted(servers, disk, folder, False, 0)
        with worker(servers) as client:
            push(servers, client, STEPS)
        check_weights(folder, version + 1)
        servers.close()
    return disk


# ---- all of them ---------------------------------------------------------------------------------


def walk(
    folder: Path,
    one: Callable[[Path, int], Operations],
    numbers: Iterable[int] = range(1, FOR_GOOD),
) -> int:
    """`one` at each of these operations, as far as its job has them; how many. A failure names
    the operation.
    """
    done = 0
    for number in numbers:
        place = folder / str(number)
        try:
            disk = one(place, number)
        except BaseException as error:
            error.add_note(f"at operation {number}")
            raise
        if not disk.acted:
            break
        shutil.rmtree(place)
        done += 1
    return done


def failing_with(
    durability: str, trouble: str, lasts: bool = False
) -> Callable[[Path, int], Operations]:
    """For `walk`."""
    return lambda folder, number: fails(folder, durability, number, TROUBLES[trouble], lasts)


def again(number: int) -> int:
    """Operations until the second death: while the successor reads its log, or soon after."""
    return number * 7 % 23 + 1


def writes(folder: Path, durability: str) -> list[int]:
    """The operations that can be cut short, counted from 1."""
    disk = fails(folder, durability, FOR_GOOD, TROUBLES["short"])
    return [
        number
        for number, operation in enumerate(disk.seen[: disk.last], 1)
        if operation.name in CUT_SHORT
    ]


def in_turn(durability: str) -> Callable[[Path, int], Operations]:
    """Return a function for `walk`: each operation fails with one of the system's reasons.

    All reasons have the same effect.
    """
    return lambda folder, number: fails(
        folder, durability, number, TROUBLES[ERRNOS[number % len(ERRNOS)]]
    )


WALKS: dict[str, Callable[[Path, int], Operations]] = {
    **{
        f"{trouble}, {durability}{', for long' if lasts else ''}": failing_with(
            durability, trouble, lasts
        )
        for trouble in TROUBLES
        for durability in ("log", "snapshot")
        for lasts in (False, True)
    },
    **{f"any errno, {durability}": in_turn(durability) for durability in ("log", "snapshot")},
    "a death, log": dies,
    "two deaths, log": lambda folder, number: dies(folder, number, again(number)),
    "a death of all, snapshot": all_die,
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(WALKS)))
def main(names: Sequence[str]) -> None:
    """Walks through all operations with each kind of trouble, or with those named."""
    for name in names or WALKS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ps-") as folder:
            done = walk(Path(folder), WALKS[name])
        click.echo(f"{name}: all {done} operations, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
