"""Discovery of a job's servers, from the addresses that the user gave."""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from pscommon.core.errors import (
    AuthenticationError,
    InvalidRequestError,
    MismatchError,
    UnreachableError,
)
from pscommon.core.formats import check_wire_format
from pscommon.security.credentials import use_local_tokens
from pscommon.security.settings import is_loopback
from pscommon.security.tokens import ROLES
from pscommon.system import signals as interruptible
from pscommon.system.local_jobs import local_shards, only_local_job
from pscommon.telemetry.logs import get_logger
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import DESCRIBE, INTRODUCE, Stub, call
from pscommon.wire.status import translated
from pscommon.wire.tls_probe import cause_of
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.retry import LogTimer
from psworker.core.server_search import JobServers, ServerDescription, ServerSearch

GRACE_SECONDS = 5.0
CALL_SECONDS = 2.0
PAUSE_SECONDS = 0.1

ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[^\s\[\]:,/]+):([0-9]{1,5})")

log = get_logger(__name__)

ChannelTo = Callable[[str], grpc.Channel]


def addresses_of(servers: str | Sequence[str] | None) -> tuple[str, ...]:
    """Parse server addresses.

    Args:
        servers: "HOST:PORT,HOST:PORT" or a sequence of addresses. None: PS_SERVERS, else the
            user's only job on this machine (with the name PS_JOB, if that is set).

    Raises:
        InvalidRequestError: An address is invalid, or there is none.
        MismatchError: An address is listed twice.
    """
    if servers is None:
        servers = os.environ.get("PS_SERVERS", "")
        if not servers.strip():
            local = only_local_job(
                "no servers are named (HOST:PORT or PS_SERVERS)", os.environ.get("PS_JOB", "")
            )
            log.info("local_job_found", job=local.job, address=local.address, pid=local.pid)
            return (local.address,)
    listed = servers.split(",") if isinstance(servers, str) else list(servers)
    found = tuple(address.strip() for address in listed if address.strip())
    for address in found:
        match = ADDRESS.fullmatch(address)
        if not match or not 0 < int(match[1]) < 65536:
            raise InvalidRequestError(f"{address!r} is not an address of the form HOST:PORT")
        if found.count(address) > 1:
            raise MismatchError(
                f"{address} is listed twice. Try: list each server once", "SHARD_MISMATCH"
            )
    if not found:
        raise InvalidRequestError("the list of servers is empty")
    return found


def use_tokens_of(servers: Sequence[str]) -> tuple[str, ...]:
    """Send the token of a job of this user on this machine, if a shard has one of these addresses.

    Returns the addresses. Another one of loopback with the shard's port becomes the shard's own: at
    "localhost" a server of another user might get the token.
    """
    found = list(servers)
    with contextlib.suppress(OSError):
        for shard in local_shards():
            role = next((role for role in ROLES if role == shard.role), None)
            if role is None:
                continue
            for index, server in enumerate(servers):
                if server == shard.address or _is_same_port(server, shard.address):
                    use_local_tokens(((role, shard.token),))
                    found[index] = shard.address
    return tuple(found)


def _is_same_port(server: str, address: str) -> bool:
    """Return whether two addresses are of loopback and have the same port."""
    same = server.rpartition(":")[2] == address.rpartition(":")[2]
    return same and is_loopback(address) and is_loopback(server)


def discover(
    given: Sequence[str], connect_timeout: float = 60.0, grace: float = GRACE_SECONDS
) -> JobServers:
    """Find all servers of the job that the given servers belong to.

    One address suffices if its server is shard 0 or follows it. Servers that were started
    without --join receive shard 0's address, if all servers are listed.

    Args:
        given: Addresses that the user listed.
        connect_timeout: Seconds until the search fails.
        grace: Seconds without new information before an incomplete set is an error.

    Raises:
        UnreachableError: The search has failed.
        MismatchError: The addresses are not the servers of one job.
    """
    started = time.monotonic()
    search, log_timer = ServerSearch(given, started, grace), LogTimer(started)
    with _open_channels() as channel_to:
        while True:
            _ask(search, channel_to, min(CALL_SECONDS, max(0.1, connect_timeout)))
            if search.complete:
                return search.cluster()
            _introduce(search, channel_to)
            now = time.monotonic()
            search.check(now)
            if now - started >= connect_timeout:
                raise search.gave_up(now - started)
            if log_timer.is_due(now):
                log.info("servers_incomplete", problem=str(search.gave_up(now - started)))
            if not search.has_unasked():
                time.sleep(PAUSE_SECONDS)


def describe(address: str, timeout: float = 5.0) -> ServerDescription:
    """Return one server's description.

    Args:
        address: HOST:PORT of the server.
        timeout: Deadline in seconds.

    Raises:
        UnreachableError: The server does not answer.
        FormatError: The server is newer than this process.
    """
    with open_channel(Endpoint(address)) as channel:
        who = f"the server at {address}"
        return _described(call(channel, DESCRIBE, ps.DescribeRequest(), timeout, who), address)


@contextlib.contextmanager
def _open_channels() -> Iterator[ChannelTo]:
    """Yield a function that returns a channel to an address; close the channels at the end."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda address: stack.enter_context(open_channel(Endpoint(address))))


def _ask(search: ServerSearch, channel_to: ChannelTo, timeout: float) -> None:
    """Ask all servers at the same time, so that one that hangs does not delay the others."""
    calls: list[tuple[str, Any]] = []
    with interruptible.deferred(lambda _: [call.cancel() for _, call in calls]):
        for address in search.to_ask():
            ask = Stub(channel_to(address), DESCRIBE)
            calls.append((address, ask.future(ps.DescribeRequest(), timeout=timeout)))
        for address, call in calls:
            try:
                with translated(f"the server at {address}"):
                    answer = _described(call.result(), address)
            except UnreachableError as error:
                refusal = cause_of(error, address)
                if isinstance(refusal, AuthenticationError):
                    raise refusal from error
                search.failed(address, str(error))
            else:
                search.answered(address, answer, time.monotonic())


def _introduce(search: ServerSearch, channel_to: ChannelTo) -> None:
    for address, leader in search.introductions():
        request, who = ps.IntroduceRequest(coordinator=leader), f"the server at {address}"
        with contextlib.suppress(UnreachableError):
            call(channel_to(address), INTRODUCE, request, CALL_SECONDS, f"{who} (Introduce)")


def _described(message: ps.DescribeResponse, address: str) -> ServerDescription:
    check_wire_format(message.format, f"the server at {address}", "this process")
    return ServerDescription(
        message.job,
        message.shard,
        message.shards,
        tuple(message.addresses),
        message.coordinator,
        message.layout,
    )
