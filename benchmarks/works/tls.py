"""What TLS costs: a step of a large and of a small model, with and without certificates."""

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.rounds import Entry
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import TCP, TLS, job, ours, peer
from benchmarks.works.work import Lineup, Work
from pscommon.security.certificates import init_tls

LANES = ("grpc", "stream", "shm")
ABOUT = (
    "in turns with and without TLS (1 worker, 1 server, SGD). Shared memory is not encrypted; its "
    "requests use a Unix socket. The plain TLS connection does the same work with Python's ssl."
)


def secured(lane: str) -> str:
    """Return a contender's name."""
    return ours(lane, "TLS")


def entries(setup: Setup, resources: ExitStack) -> list[Entry]:
    folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-tls-"))
    init_tls(Path(folder))
    with_tls = replace(setup, tls=folder)
    found = []
    for lane in LANES:
        found.append(job(ours(lane), replace(setup, lanes=lane)))
        found.append(job(secured(lane), replace(with_tls, lanes=lane)))
    return [*found, peer(TCP, "plain_tcp", setup), peer(TLS, "plain_tcp", with_tls)]


def large(scale: Scale, resources: ExitStack) -> Lineup:
    return Lineup(entries(Setup(scale.large), resources))


def small(scale: Scale, resources: ExitStack) -> Lineup:
    setup = Setup(scale.small, model="26", policy="async", pieces=scale.small_pieces)
    return Lineup(entries(setup, resources))


LARGE = Work("tls", f"push_pull of 100 MB {ABOUT}", large)
SMALL = Work("tls_small", f"A step of a 50 kB model in 26 arrays {ABOUT}", small)
