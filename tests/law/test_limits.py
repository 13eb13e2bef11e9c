"""The page of limits has every limit, with the number that the code has.

After a change of a limit run `python -m tests.law.test_limits`: it writes the page.
"""

from importlib import import_module
from typing import NamedTuple

from pscommon.core import limits
from tests.support.sources import ROOT

PAGE = ROOT / "docs/reference/limits.md"

REFUSED = "the request is refused (OUT_OF_RANGE)"
OLDEST = "the oldest is closed"
UNITS = (("PiB", 1 << 50), ("MiB", 1 << 20), ("KiB", 1 << 10))


class Limit(NamedTuple):
    """A row of the page.

    Attributes:
        what: What is limited.
        source: A constant of limits.py, another one as module:NAME, or a flag.
        beyond: What happens beyond it.
        number: The number of a flag; that of a constant comes from the code.
    """

    what: str
    source: str
    beyond: str = REFUSED
    number: str = ""


CONFIG, ENDPOINT = "psserver.process.config", "pscommon.wire.endpoint"
STREAMS = "pscommon.wire.stream_format"

ROWS = (
    # connections
    Limit(
        "workers at a time",
        "`--max-workers`",
        "Join is refused",
        "by the limit of open files; at most 960 with `--lanes grpc`",
    ),
    Limit(
        "gRPC calls at a time",
        f"{CONFIG}:MAX_CONCURRENT_CALLS",
        "the call gets RESOURCE_EXHAUSTED; workers repeat it",
    ),
    Limit("connections to a stream port that have not greeted", "MAX_UNGREETED_STREAMS", OLDEST),
    Limit("seconds until the greeting of a stream", f"{STREAMS}:HELLO_SECONDS", "it is closed"),
    Limit("streams of a worker for tensors", "", OLDEST, "1"),
    Limit("streams of a worker for requests", "MAX_REQUEST_STREAMS", OLDEST),
    # bytes
    Limit(
        "bytes of pushes and pulls in a server",
        "`--in-flight`",
        "a push waits, then gets IN_FLIGHT and is repeated; a pull is answered as pending",
        "half of the memory",
    ),
    Limit(
        "pushes of a worker in a shard: one that arrives, one that is not decided",
        "MAX_PUSHES_PER_WORKER",
        "the next one waits, then gets IN_FLIGHT and is repeated",
    ),
    Limit(
        "pulls of a worker from a shard",
        "MAX_PULLS_PER_WORKER",
        "the next one waits, then is answered as pending",
    ),
    Limit("bytes of a gRPC message", f"{ENDPOINT}:MAX_MESSAGE_BYTES", "RESOURCE_EXHAUSTED"),
    Limit("bytes of a greeting of a stream", f"{STREAMS}:MAX_HELLO_BYTES", "the stream is closed"),
    Limit(
        "bytes of a message in a frame of a stream",
        f"{STREAMS}:MAX_FRAME_MESSAGE_BYTES",
        "the stream is closed",
    ),
    Limit(
        "bytes of the spans in one message",
        "MAX_SPAN_BATCH_NBYTES",
        "later steps are dropped and counted",
    ),
    Limit("milliseconds that a request may wait", "MAX_WAIT_MS"),
    # job and workers
    Limit("servers", "MAX_SHARDS"),
    Limit("workers in a report of a shard", "MAX_MEMBERS", "the connection of the shard ends"),
    Limit(
        "worker numbers of one start of the servers",
        "WORKERS_PER_GENERATION",
        "numbers of the next start are reserved",
    ),
    Limit("rank of a worker", "MAX_RANK"),
    Limit("starts of a worker before this one", "MAX_ATTEMPT"),
    Limit("characters in the name of a host, device, loader or value", "MAX_NAME_CHARACTERS"),
    Limit("characters in a reason for leaving", "MAX_REASON_CHARACTERS", "the text is cut"),
    # model and pushes
    Limit("tensors of a model", "MAX_TENSORS"),
    Limit("dimensions of a tensor", "MAX_DIMENSIONS"),
    Limit("bytes of a shard's part, file or log", "MAX_SHARD_NBYTES"),
    Limit("samples of a push or a collective value", "MAX_SAMPLES_PER_PUSH"),
    # data
    Limit("batches that one request leases", "MAX_BATCHES_PER_REQUEST"),
    Limit("batches that a push uses up, or that are returned", "MAX_BATCHES_PER_PUSH"),
    Limit("number of a batch", "MAX_BATCH_NUMBER"),
    Limit("number of a loop, or of a pass of a loader", "MAX_LOOPS"),
    Limit("loaders of a script with open passes", "MAX_LOADERS"),
    Limit("sources x epochs of a stream", "MAX_LAPS"),
    # values
    Limit("names of reported values in a job", "MAX_METRICS", f"{REFUSED}; in a heartbeat dropped"),
    Limit("reported values in one request", "MAX_REPORTED_VALUES"),
    Limit("values of one all_reduce", "MAX_COLLECTIVE_VALUES"),
    Limit("bytes of the JSON text of a broadcast", "MAX_BROADCAST_NBYTES"),
)


def is_constant(limit: Limit) -> bool:
    return bool(limit.source) and not limit.source.startswith("`")


def number_of(limit: Limit) -> str:
    if not is_constant(limit):
        return limit.number
    module, _, name = limit.source.rpartition(":")
    value = getattr(import_module(module) if module else limits, name)
    if name.endswith("BYTES"):
        for unit, nbytes in UNITS:
            if value % nbytes == 0 and value >= nbytes:
                return f"{value // nbytes} {unit}"
    if value == 2**63 - 1:
        return "2^63 - 1"
    if value > 10**9:
        return f"2^{value.bit_length() - 1}"
    return f"{int(value):,}".replace(",", " ")


def source_of(limit: Limit) -> str:
    module, _, name = limit.source.rpartition(":")
    if not is_constant(limit):
        return limit.source
    return f"`{name}`" + (f" in `{module.replace('.', '/')}.py`" if module else "")


def page() -> str:
    lines = [
        "# Limits",
        "",
        "What servers accept. Constants without a module are in `pscommon/core/limits.py`. Only",
        "flags can be set. `python -m tests.law.test_limits` writes this page.",
        "",
        "Each integer of each request has a range: one row of `pscommon/wire/ranges.py`. A number",
        "beyond it is refused when the message is decoded, before memory is taken. The error names",
        "the message, the field, the number and the range.",
        "",
        "There is no limit per address: many workers on one host are normal.",
        "",
        "| limit | number | flag or constant | beyond it |",
        "| --- | --- | --- | --- |",
    ]
    for row in ROWS:
        lines.append(f"| {row.what} | {number_of(row)} | {source_of(row)} | {row.beyond} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_each_limit() -> None:
    constants = {
        name for name in vars(limits) if name.isupper() and isinstance(getattr(limits, name), int)
    }

    assert constants <= {row.source for row in ROWS}
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
