"""The connections between rank 0 of a group and its other ranks, and the watch over all ranks.

Each rank has two connections of a Unix socket to rank 0. The script's thread uses the first one:
it sends what a call of the group needs and receives its result. A watching thread uses the second
one: it notices at once that a process has ended, and after some time that one is stopped. It also
carries what needs no call of all ranks.

A rank that is blocked in a collective call of torch reacts to no signal, so the watching thread
ends the process (exit code 21).
"""

import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Protocol

from pscommon.core.errors import (
    MismatchError,
    PSError,
    TooFewWorkersError,
    UnreachableError,
    WaitTimeoutError,
)
from pscommon.core.exit_codes import ExitCode
from pscommon.telemetry.logs import get_logger
from psworker.core.group_place import GroupPlace

JSON = Any

HEAD = struct.Struct("<I")
CREDENTIALS = struct.Struct("iII")

OPEN_SECONDS = 60.0
"""Longest time between the first and the last rank that starts."""
POLL_SECONDS = 0.02
BEAT_SECONDS = 0.5
SILENT_SECONDS = 12.0
"""A rank without a sign of life for this time is stopped, if no job says otherwise."""
NOTICE_SECONDS = 10.0
"""A wait for another rank is logged after this time."""
END_SECONDS = 1.0
"""A rank that fails waits this long for the end of another rank, which may be the cause."""

log = get_logger(__name__)


class Channel:
    """One connection with messages of JSON. One thread at a time receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.fileno = sock.fileno
        self._send_lock = threading.Lock()

    def send(self, message: JSON, descriptor: int | None = None) -> None:
        """Send a message, and with it perhaps an open file. Raises OSError."""
        data = json.dumps(message).encode()
        with self._send_lock:
            self.socket.sendall(HEAD.pack(len(data)) + data)
            if descriptor is not None:
                socket.send_fds(self.socket, [b"d"], [descriptor])

    def receive(self) -> JSON:
        """Return the next message. Raises EOFError, OSError or TimeoutError."""
        (nbytes,) = HEAD.unpack(self._exactly(HEAD.size))
        return json.loads(self._exactly(nbytes))

    def receive_descriptor(self) -> int:
        """Return the open file that follows a message."""
        _, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        if len(descriptors) != 1:
            raise EOFError
        return descriptors[0]

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            piece = self.socket.recv(nbytes - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


class LinkListener(Protocol):
    """What a job does in the watching thread."""

    def take(self, message: JSON) -> None:
        """Take a message of another rank."""

    def report_loss(self, reason: str) -> None:
        """Tell the servers that the worker is lost."""


class GroupLink:
    """Connects the ranks of a group; rank 0 is in the middle.

    It lasts as long as the process, over several jobs.

    Args:
        place: This rank.
        name: Name that the ranks of this group have, and no other group on this machine.

    Attributes:
        listener: What a job does with messages of other ranks; None: there is no job.
        timeout: Seconds that rank 0 waits for another one in a call of the group.
        silent_seconds: Time after which a rank without a sign of life counts as stopped.
    """

    def __init__(self, place: GroupPlace, name: str) -> None:
        self.rank, self.size = place
        self.listener: LinkListener | None = None
        self.timeout = OPEN_SECONDS
        self.silent_seconds = SILENT_SECONDS
        self._is_closed = False
        self._failure: PSError | None = None
        address = f"\0paramserver-group-{os.getuid()}-{name}"
        self._calls, self._watched = (
            _connect(address, place) if self.rank else _accept(address, place)
        )
        self._thread = threading.Thread(target=self._watch, name="group-watch", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._forget)

    # ---- calls -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error after which the ranks are not at the same call any more, if any."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: PSError) -> NoReturn:
        """Raise an error, and raise it again in each later call."""
        self._failure = error
        raise error

    def gather(self, call: str, own: JSON) -> list[JSON]:
        """Return what all ranks pass to a call, by rank; empty on other ranks than 0.

        Raises:
            MismatchError: Another rank makes another call.
            WaitTimeoutError: A rank does not make the call in time.
            TooFewWorkersError: A rank has ended.
        """
        self.check()
        if self.rank:
            self._guarded(0, lambda: self._calls[0].send([call, own]))
            return []
        found, differing = [own], dict[int, str]()
        deadline, notice = time.monotonic() + self.timeout, time.monotonic() + NOTICE_SECONDS
        for rank in sorted(self._calls):
            self._await(rank, call, deadline, notice)
            name, value = self._guarded(rank, self._calls[rank].receive)
            found.append(value)
            if name != call:
                differing[rank] = name
        if differing:
            self.refuse(call, differing)
        return found

    def refuse(self, call: str, differing: Mapping[int, str]) -> NoReturn:
        """Fail because ranks make other calls than rank 0. differing: Their calls, by rank."""
        others = ", ".join(f"rank {rank} {name}" for rank, name in differing.items())
        self.fail(
            MismatchError(
                f"the ranks of this group make different calls: rank 0 {call}, {others}. Try: the "
                "same calls on all ranks in the same order; only job.save, job.report and the like "
                "may stand under `if job.is_first`",
                "COLLECTIVE_MISMATCH",
            )
        )

    def _await(self, rank: int, call: str, deadline: float, notice: float) -> None:
        while not select.select([self._calls[rank]], [], [], 1.0)[0]:
            now = time.monotonic()
            if now > deadline:
                self.fail(
                    WaitTimeoutError(
                        f"rank {rank} of this group did not call {call} within "
                        f"{self.timeout:g} s. Try: find what it does (py-spy dump), or a larger "
                        "wait_timeout of connect()"
                    )
                )
            if now > notice:
                notice = float("inf")
                log.warning("group_waits", rank=rank, call=call, seconds=NOTICE_SECONDS)

    def spread(self, message: JSON, descriptor: int | None = None) -> None:
        """Send a message, and perhaps an open file, to all other ranks; only on rank 0."""
        for rank, channel in self._calls.items():
            self._guarded(rank, partial(channel.send, message, descriptor))

    def receive(self) -> JSON:
        """Return the next message that rank 0 spreads; only on other ranks."""
        return self._guarded(0, self._calls[0].receive)

    def receive_descriptor(self) -> int:
        """Return the open file that came with the last message; the caller closes it."""
        return int(self._guarded(0, self._calls[0].receive_descriptor))

    def _guarded(self, rank: int, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (EOFError, OSError) as error:
            self.settle()
            raise TooFewWorkersError(
                f"rank {rank} of this group has ended its script, and this rank has not. Try: the "
                "same calls on all ranks"
            ) from error

    # ---- watch -----------------------------------------------------------------------------------

    def notify(self, message: JSON) -> None:
        """Send a message to the listener of rank 0, or of all others; without waiting for it."""
        for channel in self._watched.values():
            with suppress(OSError):
                channel.send(message)

    def settle(self) -> None:
        """Wait for the end of another rank, which may be why this one fails; then this one ends."""
        if not self._is_closed:
            self._thread.join(END_SECONDS)

    def close(self, is_done: bool) -> None:
        """End the connections. May be called again.

        is_done: The others may go on; otherwise they end.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if is_done:
            self.notify("done")
        for channel in (*self._calls.values(), *self._watched.values()):
            with suppress(OSError):
                channel.socket.shutdown(socket.SHUT_RDWR)
            channel.socket.close()

    def _forget(self) -> None:
        """Close the sockets in a fork, such as a DataLoader's process: it must not keep them open
        when this process ends.
        """
        self._is_closed = True
        for channel in (*self._calls.values(), *self._watched.values()):
            channel.socket.close()

    def _watch(self) -> None:
        beat = time.monotonic()
        last = dict.fromkeys(self._watched, beat)  # time of the last message, by rank
        while last and not self._is_closed:
            channels = [self._watched[rank] for rank in last]
            try:
                readable = select.select(channels, [], [], BEAT_SECONDS)[0]
            except (OSError, ValueError):  # closed meanwhile
                return
            now = time.monotonic()
            if now - beat > 4 * BEAT_SECONDS:  # this process was stopped
                last = dict.fromkeys(last, now)
            if now - beat > BEAT_SECONDS:
                beat = now
                self.notify("beat")
            for rank in [rank for rank in last if self._watched[rank] in readable]:
                last[rank] = now
                if self._receive_watched(rank):
                    del last[rank]
            for rank, time_of_last in last.items():
                if now - time_of_last > self.silent_seconds:
                    self._end(rank, f"has shown no sign of life for {now - time_of_last:.0f} s")

    def _receive_watched(self, rank: int) -> bool:
        """Receive a message of a rank; return whether it is done."""
        try:
            message = self._watched[rank].receive()
        except (EOFError, OSError, ValueError):
            if not self._is_closed:
                self._end(rank, "has ended")
            return True
        if isinstance(message, list):  # rank 0 has seen the end of another rank
            self._end(*message)
        if message not in ("beat", "done") and self.listener is not None:
            self.listener.take(message)
        return bool(message == "done")

    def _end(self, rank: int, why: str) -> NoReturn:
        """End this process: the group cannot go on without a rank."""
        self.notify([rank, why])
        if self.listener is not None:
            with suppress(Exception):
                self.listener.report_loss(f"rank {rank} of its group {why}")
        print(
            f"psworker: rank {self.rank} ends: rank {rank} of this group {why}. Try: the log of "
            f"rank {rank}; a restarted group takes the worker's place",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ExitCode.TOO_FEW_WORKERS)


def _accept(address: str, place: GroupPlace) -> tuple[dict[int, Channel], dict[int, Channel]]:
    found: dict[str, dict[int, Channel]] = {"calls": {}, "watch": {}}
    deadline = time.monotonic() + OPEN_SECONDS
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(address)
        except OSError as error:
            raise UnreachableError(
                f"another group on this machine has the name {address[1:]}: {error.strerror}. Try: "
                "another --master-port of torchrun for each group"
            ) from error
        listening.listen(2 * place.size)
        while min(map(len, found.values())) < place.size - 1:
            listening.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock, _ = listening.accept()
            except TimeoutError:
                absent = sorted(set(range(1, place.size)) - found["watch"].keys())
                raise UnreachableError(
                    f"ranks {absent} of this group did not connect to rank 0 within "
                    f"{OPEN_SECONDS:g} s. Try: `ps-worker --group` or psworker.connect() on each"
                ) from None
            if not _is_own_user(sock):
                sock.close()
                continue
            channel = Channel(sock)
            kind, rank = channel.receive()
            found[kind][rank] = channel
    return found["calls"], found["watch"]


def _is_own_user(sock: socket.socket) -> bool:
    """Return whether the peer is a process of this user: names of Unix sockets are free for all."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(data)[1] == os.getuid())


def _connect(address: str, place: GroupPlace) -> tuple[dict[int, Channel], dict[int, Channel]]:
    found = []
    deadline = time.monotonic() + OPEN_SECONDS
    for kind in ("calls", "watch"):
        channel = Channel(_reach(address, deadline))
        channel.send([kind, place.rank])
        found.append({0: channel})
    return found[0], found[1]


def _reach(address: str, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
            if _is_own_user(sock):
                return sock
            problem = "another user has its address"
        except OSError as error:
            problem = str(error.strerror)
        sock.close()
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"rank 0 of this group was not found on this machine: {problem}. Try: all ranks "
                "of a group on one machine, one torchrun for each"
            )
        time.sleep(POLL_SECONDS)
