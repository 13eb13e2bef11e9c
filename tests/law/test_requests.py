"""The table of requests agrees with the services of proto/, with handlers and with documents.

After a change of the table run `python -m tests.law.test_requests`: it writes the reference page.
"""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import iscoroutinefunction, signature, unwrap
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import pytest
from google.protobuf.descriptor import MethodDescriptor

from pscommon.core.errors import UnreachableError
from pscommon.wire.requests import EXCHANGE, LINK_SHARD, REQUESTS, STREAM_FIELDS, AnyRequest
from psproto.v1 import (
    coordinator_pb2,
    log_pb2,
    model_pb2,
    parameter_server_pb2,
    shard_pb2,
    standby_pb2,
    stream_pb2,
)
from psserver.coordinator.handlers import coordinator_handlers
from psserver.exchange.handlers import data_plane_handlers
from psserver.peers.peer_handlers import peer_handlers
from psserver.process.handlers import Handlers
from psserver.replication.handlers import primary_handlers, standby_handlers
from psserver.waiting import ThreadWaiter, Waiter
from psworker.connection.connection import Connection
from psworker.connection.membership import WorkerMembership
from psworker.connection.retry import TimeLimits
from psworker.core.clock import Clock
from tests.support.sources import ROOT

PAGE = ROOT / "docs/reference/requests.md"
FILES = (
    coordinator_pb2,
    log_pb2,
    model_pb2,
    parameter_server_pb2,
    shard_pb2,
    standby_pb2,
    stream_pb2,
)
WAITS_WITHOUT_TIME = ("StepDown", "ReadShard", "LinkShard", "Exchange", "ExchangeOnce", "Replicate")
"""Rows that may wait although their message has no `wait_ms`: a stream, or a fixed time."""


def methods() -> Iterator[MethodDescriptor]:
    """Yield the RPCs of all proto files."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def page() -> str:
    """Return the reference page."""
    lines = [
        "# Requests",
        "",
        "Each request between the processes of a job is one row of `pscommon/wire/requests.py`.",
        "`python -m tests.law.test_requests` writes this page.",
        "",
        "- A request that *may wait* is held by the server until it can answer.",
        "- One that *may be repeated* is sent again by a worker that gets no answer.",
        "- *Over streams*: it uses a stream where the server has one, else gRPC.",
        "- *Role* is that of the token that it needs, where servers have tokens. Every role may",
        "  send what `read` may, and `admin` everything.",
        "",
        "| request | messages | role | may wait | may be repeated | over streams |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in REQUESTS:
        first, _, second = row.kind.partition("_")
        kinds = ["a stream" if kind == "stream" else "one" for kind in (first, second)]
        facts = (
            row.may_wait,
            row.may_repeat,
            row in STREAM_FIELDS or row in (EXCHANGE, LINK_SHARD),
        )
        cells = [
            f"`{row}`",
            " to ".join(kinds),
            row.role,
            *("yes" if fact else "" for fact in facts),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_table_has_one_row_for_each_rpc() -> None:
    described = [
        (
            f"/{method.containing_service.full_name}/{method.name}",
            method.input_type.full_name,
            method.output_type.full_name,
        )
        for method in methods()
    ]
    rows = [
        (row.path, row.request.DESCRIPTOR.full_name, row.response.DESCRIPTOR.full_name)
        for row in REQUESTS
    ]

    assert sorted(rows) == sorted(described)
    assert len(rows) == 29


def test_a_request_with_a_time_may_wait() -> None:
    for row in REQUESTS:
        has_time = "wait_ms" in row.request.DESCRIPTOR.fields_by_name
        assert row.may_wait == (has_time or row.name in WAITS_WITHOUT_TIME), row


def test_each_kind_of_coordinator_request_is_a_row() -> None:
    fields = [field.name for field in stream_pb2.CoordinatorRequest.DESCRIPTOR.fields]

    assert sorted(STREAM_FIELDS.values()) == sorted(fields)
    assert all(row.kind == "unary_unary" and row.role == "worker" for row in STREAM_FIELDS)


def bound() -> Iterator[tuple[AnyRequest, Callable[..., Any]]]:
    """Yield the handlers of a primary of shard 0, and those of a standby."""
    handlers: tuple[Handlers, ...] = (
        coordinator_handlers(Mock()),
        data_plane_handlers(Mock(), Mock()),
        peer_handlers(Mock(), Mock()),
        primary_handlers(Mock(), Mock(), Mock()),
        standby_handlers(Mock()),
    )
    for each in handlers:
        yield from each.items()


def test_a_primary_and_its_standby_bind_each_row() -> None:
    assert {row for row, _ in bound()} == set(REQUESTS)


def test_a_handler_takes_the_message_of_its_row() -> None:
    for row, handler in bound():
        given = list(signature(handler).parameters)
        function = handler.func if isinstance(handler, partial) else unwrap(handler)
        hints, is_driver = get_type_hints(function), row.is_framed or row.kind != "unary_unary"
        if hints[given[0]] is object:  # refuses everything
            continue
        if not is_driver:
            assert hints[given[0]] is row.request, row
            assert len(given) == 1 + row.may_wait, row
            assert iscoroutinefunction(function) == row.may_wait, row
        elif not row.is_framed:
            message = get_args(hints[given[0]]) or (hints[given[0]],)
            assert message == (row.request,), row
        if row.may_wait and not is_driver:
            assert hints[given[1]] in (Waiter, ThreadWaiter), row


@pytest.mark.parametrize(
    "row",
    [row for row in REQUESTS if row.role in ("worker", "read") and not row.is_framed],
    ids=str,
)
def test_a_worker_repeats_what_may_be_repeated_and_nothing_else(row: AnyRequest) -> None:
    answer = row.response()
    transport = Mock(direct=True, clock=Clock(lambda: 0.0, lambda seconds: None))
    transport.request.side_effect = [UnreachableError("lost", "UNREACHABLE"), answer]
    connection = Connection(transport, TimeLimits(connect=10, wait=10), WorkerMembership("job", 0))

    if row.may_repeat:
        assert connection.new_retry("asking").ask(row, row.request()) is answer
    else:
        with pytest.raises(UnreachableError, match=r"^lost$"):
            connection.new_retry("asking").ask(row, row.request())
    assert transport.request.call_count == 1 + row.may_repeat


def test_the_reference_shows_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
