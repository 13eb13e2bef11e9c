"""A short job whose n-th disk operation fails, or whose server is killed there, for each n.

The job registers a model, pushes ones with a snapshot after every second push, restarts all
servers, and pushes again. So the servers begin, append to, retire and read logs, and write, remove
and load snapshots. They run in one thread (single_thread_servers.py).

As a program, it runs each kind of failure, and a second kill after each first one, at each
operation: python -m tests.sim.every_operation
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
from tests.sim.single_thread_servers import DirectServers, ServerKilled
from tests.support import workers
from tests.support.disk_operations import TROUBLES, Act, Operation, Operations
from tests.support.events import event_key
from tests.support.snapshot_files import stored
from tests.support.workers import counted, counter

BEFORE, AFTER, STEPS = 3, 2, 2
"""Pushes before the restart and after it; updates between two snapshots."""
UNLIMITED = 1 << 30
REPAIR_TICKS = 20
"""Ticks within which servers must repair their logs when the disk works again."""
LOG_UNWRITABLE = "log_unwritable"
EMPTY_LOG = "there is none since version 0"
"""Part of the message on a log whose server was killed before the log had its first segment."""
ERRNOS = ("ENOSPC", "EIO", "EROFS")
REPORTED = ("open", "write", "save")
"""Operations whose failures the servers must report."""
PARTIAL = ("write", "save", "overwrite")
"""Operations that can write a part of their data."""


class KillServer:
    """Handles a disk operation (Act): kill the server that performs it.

    second_after: number of operations after which a second server is killed; 0: none.
    """

    def __init__(self, servers: DirectServers, second_after: int = 0) -> None:
        self.kills = 0
        self._servers = servers
        self._second_after, self._remaining = second_after, 0

    def __call__(
        self, operation: Operation, real: Callable[[], Any], arguments: Sequence[Any]
    ) -> Any:
        process = self._servers.active
        kills = 2 if self._second_after else 1
        if not process.is_killed and self._remaining == 0 and self.kills < kills:
            process.is_killed, self._remaining = True, self._second_after
            self.kills += 1
        elif not process.is_killed:
            self._remaining -= 1
        if process.is_killed:
            raise ServerKilled
        return real()


@contextmanager
def captured_errors() -> Iterator[list[logging.LogRecord]]:
    """Let servers repair broken logs without delay. Yield the servers' errors."""
    records: list[logging.LogRecord] = []
    handler, log = logging.Handler(logging.ERROR), logging.getLogger("psserver")
    handler.emit = records.append  # type: ignore[method-assign]
    hook = threading.excepthook
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psserver.core.commands.recorder, "LOG_REPAIR_INTERVAL_SECONDS", 0.0)
        # a server may be killed in the thread that writes a snapshot
        patch.setattr(
            threading,
            "excepthook",
            lambda args: None if args.exc_type is ServerKilled else hook(args),
        )
        patch.setattr(log, "propagate", False)
        log.addHandler(handler)
        yield records
        log.removeHandler(handler)


def make_servers(folder: Path, durability: str, restarts_killed: bool = True) -> DirectServers:
    every = SnapshotEvery(steps=STEPS)
    return DirectServers(
        folder,
        restarts_killed=restarts_killed,
        durability=durability,
        snapshot_every=every,
        policy="async",
    )


def worker(servers: DirectServers) -> Client:
    return counter("", lane=servers.transport())


def push(servers: DirectServers, client: Client, steps: int) -> None:
    """Push ones, and let the servers complete snapshots."""
    for _ in range(steps):
        workers.count(client)
        servers.tick()


def newest_version(folder: Path) -> int:
    """Return the version of the newest snapshot, or 0. Check all snapshots with a manifest."""
    snapshots = SnapshotDirectory(folder)
    assert [
        problem for version in snapshots.versions() for problem in snapshots.verify(version)
    ] == []
    return max(snapshots.versions(), default=0)


def check_weights(folder: Path, version: int) -> None:
    """Check that the newest snapshot is at least this version and has the weights of its own."""
    found = newest_version(folder)
    assert found >= version
    assert counted(stored(folder, found)) == found


def start(servers: DirectServers, disk: Operations) -> None:
    """Start the servers. If a disk refuses a start, start again when the disk works."""
    try:
        servers.start()
    except SnapshotError:
        servers.close()
        disk.heal()
        servers.start()


def await_log_repair(servers: DirectServers) -> None:
    """Wait until the servers have repaired all logs without a restart."""
    for _ in range(REPAIR_TICKS):
        if not servers.is_log_broken:
            return
        servers.tick()
    raise AssertionError("a log stays broken")


def restart(
    servers: DirectServers, disk: Operations, folder: Path, has_log: bool, acknowledged: int
) -> int:
    """Kill and start all servers. Return the version, which the test checks.

    With a log it is the acknowledged version, without one that of the newest snapshot.
    """
    if has_log:
        await_log_repair(servers)
    expected = acknowledged if has_log else newest_version(folder)
    servers.close()
    start(servers, disk)
    with worker(servers) as client:
        assert counted(client.pull()) == expected
    return expected


# ---- failures ------------------------------------------------------------------------------------


def run_with_failure(
    folder: Path, durability: str, number: int, failure: Act, lasts: bool = False
) -> Operations:
    """Run the job with a failure of operation `number`.

    lasts: all later operations before the restart fail, too.
    """
    has_log = durability == "log"
    with (
        captured_errors() as records,
        Operations(number, UNLIMITED if lasts else number, failure).installed() as disk,
    ):
        servers = make_servers(folder, durability)
        start(servers, disk)
        with worker(servers) as client:
            push(servers, client, BEFORE)
            assert counted(client.pull()) == BEFORE
            check_records(servers, records)
            if lasts:
                disk.heal()
                push(servers, client, 1)
        version = restart(servers, disk, folder, has_log, BEFORE + lasts)
        with worker(servers) as client:
            push(servers, client, AFTER)
        check_records(servers, records)
        if disk.acted and disk.seen[number - 1].name in REPORTED:
            assert records or servers.refused_starts
        disk.heal()
        version = restart(servers, disk, folder, has_log, version + AFTER)
        with worker(servers) as client:
            push(servers, client, STEPS)
        check_weights(folder, version)
        servers.close()
    return disk


def check_records(servers: DirectServers, records: list[logging.LogRecord]) -> None:
    """Check the errors and metrics of failed logs and snapshots.

    A process reports each log that it cannot write once.
    """
    broken = Counter(
        record.__dict__["folder"] for record in records if event_key(record) == LOG_UNWRITABLE
    )
    logs, snapshots = (
        sum(process.failures(name) for process in servers.all_processes)
        for name in ("log", "snapshot")
    )
    assert bool(broken) == bool(logs)
    assert all(
        times <= len(servers.all_processes) // len(servers.processes) for times in broken.values()
    )
    failures = [record for record in records if event_key(record) == "snapshot_failed"]
    assert bool(failures) == bool(snapshots)


# ---- kills ---------------------------------------------------------------------------------------


def run_with_kill(folder: Path, number: int, second_after: int = 0) -> Operations:
    """With logs: kill the server at operation `number`. Its restart does not affect the client."""
    servers = make_servers(folder, "log")
    with (
        captured_errors() as records,
        Operations(number, UNLIMITED, KillServer(servers, second_after)).installed() as disk,
    ):
        servers.tick()
        with worker(servers) as client:
            push(servers, client, BEFORE + AFTER)
            assert counted(client.pull()) == BEFORE + AFTER
        disk.heal()
        servers.tick()
        restart(servers, disk, folder, True, BEFORE + AFTER)
        with worker(servers) as client:
            push(servers, client, STEPS)
        check_weights(folder, BEFORE + AFTER)
        servers.close()
    assert [text for record in records if EMPTY_LOG not in (text := str(record.__dict__))] == []
    return disk


def run_with_kill_of_all(folder: Path, number: int) -> Operations:
    """Without logs: kill all servers at operation `number`. They roll back to a snapshot."""
    servers = make_servers(folder, "snapshot", restarts_killed=False)
    with captured_errors(), Operations(number, UNLIMITED, KillServer(servers)).installed() as disk:
        with suppress(ServerKilled):
            servers.start()
            with worker(servers) as client:
                push(servers, client, BEFORE + AFTER)
        disk.heal()
        servers.close()
        version = restart(servers, disk, folder, False, 0)
        with worker(servers) as client:
            push(servers, client, STEPS)
        check_weights(folder, version + 1)
        servers.close()
    return disk


# ---- series --------------------------------------------------------------------------------------


def run_series(
    folder: Path,
    run: Callable[[Path, int], Operations],
    numbers: Iterable[int] = range(1, UNLIMITED),
) -> int:
    """Run a job for each of these operations, up to the last operation of the job.

    Returns:
        The number of jobs. An error names the operation.
    """
    done = 0
    for number in numbers:
        job_folder = folder / str(number)
        try:
            disk = run(job_folder, number)
        except BaseException as error:
            error.add_note(f"at operation {number}")
            raise
        if not disk.acted:
            break
        shutil.rmtree(job_folder)
        done += 1
    return done


def with_failure(
    durability: str, failure: str, lasts: bool = False
) -> Callable[[Path, int], Operations]:
    """Return a function for run_series: each operation fails in this way."""
    return lambda folder, number: run_with_failure(
        folder, durability, number, TROUBLES[failure], lasts
    )


def second_kill_after(number: int) -> int:
    """Return the number of operations until the second kill.

    It falls into the time in which the restarted server reads its log, or soon after.
    """
    return number * 7 % 23 + 1


def partial_writes(folder: Path, durability: str) -> list[int]:
    """Return the numbers of the operations that can write a part of their data, from 1."""
    disk = run_with_failure(folder, durability, UNLIMITED, TROUBLES["short"])
    return [
        number
        for number, operation in enumerate(disk.seen[: disk.last], 1)
        if operation.name in PARTIAL
    ]


def with_each_errno(durability: str) -> Callable[[Path, int], Operations]:
    """Return a function for run_series: each operation fails with one of ERRNOS.

    All of them have the same effect.
    """
    return lambda folder, number: run_with_failure(
        folder, durability, number, TROUBLES[ERRNOS[number % len(ERRNOS)]]
    )


SERIES: dict[str, Callable[[Path, int], Operations]] = {
    **{
        f"{failure}, {durability}{', lasting' if lasts else ''}": with_failure(
            durability, failure, lasts
        )
        for failure in TROUBLES
        for durability in ("log", "snapshot")
        for lasts in (False, True)
    },
    **{
        f"any errno, {durability}": with_each_errno(durability)
        for durability in ("log", "snapshot")
    },
    "kill, log": run_with_kill,
    "two kills, log": lambda folder, number: run_with_kill(
        folder, number, second_kill_after(number)
    ),
    "kill of all, snapshot": run_with_kill_of_all,
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SERIES)))
def main(names: Sequence[str]) -> None:
    """Run all series, or those with these names."""
    for name in names or SERIES:
        start_time = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ps-") as folder:
            done = run_series(Path(folder), SERIES[name])
        click.echo(f"{name}: all {done} operations, {time.monotonic() - start_time:.0f} s")


if __name__ == "__main__":
    main()
