"""Servers on this machine for the duration of a `with` block: processes that leave no files."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from pscommon.core.errors import PSError, UnreachableError, error_for
from pscommon.core.exit_codes import ExitCode
from pscommon.core.limits import check_policy
from pscommon.security.credentials import own_servers
from pscommon.security.tokens import Tokens, new_tokens, write_tokens
from psworker.supervision.orphan_guard import spawn

START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 10.0
POLL_INTERVAL_SECONDS = 0.02
LOG_TAIL_CHARACTERS = 2000

Process = subprocess.Popen[bytes]


@contextmanager
def local_servers(
    count: int, min_workers: int, policy: str, staleness: int | None, environ: Mapping[str, str]
) -> Iterator[str]:
    """Run this number of servers on free ports of 127.0.0.1; yield the address of shard 0.

    They accept only tokens of this process, which connects only to them meanwhile.

    Raises:
        UnreachableError: A server does not start; the message has the end of its log.
        InvalidRequestError: A setting is wrong, or a server refuses it.
    """
    check_policy(policy, staleness)  # tokens exclude policy allreduce
    flags = ["--policy", policy, "--min-workers", str(min_workers), "--log-format", "text"]
    if staleness is not None:
        flags += ["--staleness", str(staleness)]
    processes: list[Process] = []
    try:
        # only during the start: a signal that ends this process later leaves no folder
        with tempfile.TemporaryDirectory(prefix="paramserver-") as folder:
            token_file = Path(folder) / "tokens"
            write_tokens(token_file, _tokens(), {})
            flags += ["--token-file", str(token_file)]
            address = ""
            for shard in range(count):
                join = ["--join", address] if shard else []
                line = ["--shard", f"{shard}/{count}", *flags, *join]
                started = _start(shard, line, environ, Path(folder), processes)
                address = address or started
        with own_servers(_tokens()):
            yield address
    finally:
        _stop(processes)


@cache
def _tokens() -> Tokens:
    """Return the tokens of all servers that this process starts: several may run at a time."""
    return new_tokens()


def _start(
    shard: int,
    flags: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    processes: list[Process],
) -> str:
    """Start a server, add it to `processes` and return its address."""
    port_file, log = folder / f"{shard}.port", folder / f"{shard}.log"
    command = [sys.executable, "-P", "-m", "psserver", *flags]
    command += ["--bind", "127.0.0.1:0", "--port-file", str(port_file)]
    with log.open("wb") as output:
        process = spawn(
            command, environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    processes.append(process)
    port = await_port(process, port_file)
    if port is None:
        raise _failure(shard, process, log)
    return f"127.0.0.1:{port}"


def await_port(process: Process, port_file: Path) -> str | None:
    """Return the port that a server has opened; None if it has ended, or needs too long."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(POLL_INTERVAL_SECONDS)
    return port_file.read_text().strip()


def _failure(shard: int, process: Process, log: Path) -> PSError:
    end = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip()
    if process.poll() == ExitCode.USAGE:
        return error_for("INVALID_REQUEST", end)
    return UnreachableError(
        f"the server of shard {shard} failed to start: exit code {process.poll()}; its log "
        f"ends with:\n{end}"
    )


def _stop(processes: list[Process]) -> None:
    # shard 0 ends last: the others wait for its message that the job has ended
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
