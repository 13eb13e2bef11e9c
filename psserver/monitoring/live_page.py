"""The live page of a job, at `/` of shard 0's metrics port, and the document that it shows.

The browser asks for /status.json every two seconds. The document is built at most once in
BUILD_SECONDS however many browsers ask, because building it takes the coordinator's lock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pscommon.core.metric_row import MetricRow
from pscommon.telemetry import strict_json
from pscommon.telemetry.http import Pages
from pscommon.telemetry.http_request import Answer, page_answer

BUILD_SECONDS = 1.0
MAX_POINTS_COUNT = 1000
"""Points of all curves."""

MAX_CURVES_COUNT = 50
"""Curves of reported values; of more names only the newest value is shown."""

MAX_WORKERS_COUNT = 200

FOLDER = Path(__file__).with_name("page")
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

Curve = dict[str, list[float]]


def live_pages(build: Callable[[], Mapping[str, Any]]) -> Pages:
    """Return the page, its parts, and its document, which `build` returns."""
    files = {
        path: page_answer(kind, (FOLDER / name).read_bytes())
        for path, (name, kind) in FILES.items()
    }
    built_at, answer = 0.0, page_answer("", b"")

    def document() -> Answer:
        # the port calls one function at a time
        nonlocal built_at, answer
        if not answer.body or time.monotonic() - built_at >= BUILD_SECONDS:
            text = strict_json.dumps(build(), separators=(",", ":"))
            answer = page_answer("application/json", text.encode())
            built_at = time.monotonic()
        return answer

    def part(answer: Answer) -> Callable[[], Answer]:
        return lambda: answer

    return {"/status.json": document, **{path: part(found) for path, found in files.items()}}


def page_url(base: str, address: str) -> str:
    """Return the URL of the page for people on other machines.

    Args:
        base: Protocol, host and port on which the port listens.
        address: HOST:PORT under which others reach this server.
    """
    scheme, _, bound = base.partition("://")
    host, _, port = bound.rpartition(":")
    if host in ("0.0.0.0", "[::]"):
        host = address.rpartition(":")[0]
    return f"{scheme}://{host}:{port}/"


def curves(
    reported: Mapping[str, Sequence[MetricRow]], speeds: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Return at most MAX_POINTS_COUNT points, with times in seconds since 1970:

    samples_per_second: times and values
    reported: times and values by name; "loss" first, then by name
    omitted: number of reported names without a curve

    Args:
        reported: Rows by name.
        speeds: Monotonic time and samples per second.
    """
    names = sorted(reported, key=lambda name: (name != "loss", name))
    shown = names[:MAX_CURVES_COUNT]
    count = MAX_POINTS_COUNT // (1 + len(shown))
    offset = time.time() - time.monotonic()
    return {
        "samples_per_second": _curve([(at + offset, value) for at, value in speeds], count),
        "reported": {
            name: _curve([(row.time, row.value) for row in reported[name]], count) for name in shown
        },
        "omitted": len(names) - len(shown),
    }


def _curve(points: Sequence[tuple[float, float]], count: int) -> Curve:
    """Return at most `count` points, with the first and the newest one."""
    last = len(points) - 1
    if last >= count:
        points = [points[i * last // (count - 1)] for i in range(count)]
    return {
        "times": [round(at, 1) for at, _ in points],
        "values": [float(f"{value:.6g}") for _, value in points],
    }
