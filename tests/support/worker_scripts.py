"""Functions that worker processes run while servers and workers are killed."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional as F

import psworker
from pscommon.security.credentials import use_credentials
from pscommon.settings.values import Lanes
from psworker import FencedError
from tests.support import small_gan
from tests.support.certificates import client_credentials
from tests.support.rpc_faults import faulty_lane
from tests.support.workers import ONES, counter

SOURCES, GAN_EPOCHS = 4, 20
POLL_SECONDS = 0.02
"""Seconds between two checks for a file."""
NO_RANKS: Mapping[int, float] = MappingProxyType({})


def network() -> nn.Sequential:
    """Return a model with all state that must survive: buffers, dropout's generator, Adam's
    moments.
    """
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(80, 6, generator=generator), torch.randint(0, 3, (80,), generator=generator)


class RowStream:
    """The data as a stream of SOURCES sources with equal shares of the rows."""

    def read(self, source: int, offset: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = data()
        share = len(x) // SOURCES
        return zip(
            x[source * share + offset :][: share - offset],
            y[source * share + offset :],
            strict=False,
        )


def train(
    address: str,
    rank: int | None,
    epochs: int = 3,
    pause: float = 0.0,
    slow: Mapping[int, float] = NO_RANKS,
    pause_at: int = 0,
    until: Path | None = None,
    streamed: bool = False,
    clip_norm: float | None = None,
) -> None:
    """Train a classifier with 10 batches per epoch and a changing learning rate; print each step.

    pause: seconds of one step; slow: other values by rank.
    until: steps from version `pause_at` wait for this file.
    streamed: read the data as a stream.
    """
    torch.set_num_threads(1)
    timer = threading.Event()
    print(f"connects {time.monotonic():.3f}", flush=True)
    with psworker.connect(address, rank=rank, device="cpu", connect_timeout=60.0) as job:
        model = network()
        optimizer = job.optimizer(
            torch.optim.Adam(model.parameters(), lr=0.05), model, clip_norm=clip_norm
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        job.resume(scheduler)
        dataset, sources = (RowStream(), SOURCES) if streamed else (data(), None)
        for x, y in job.batches(dataset, batch_size=8, epochs=epochs, seed=3, sources=sources):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            timer.wait(slow.get(rank or 0, pause))
            while until is not None and job.version >= pause_at and not until.exists():
                timer.wait(POLL_SECONDS)
            print(f"step {time.monotonic():.3f} {job.version}", flush=True)


def train_with_account(
    address: str, rank: int | None, epochs: int, pause: float, pause_at: int, until: Path
) -> None:
    """Train like `train`. Print the samples of each gradient, and what became of it."""
    torch.set_num_threads(1)
    timer = threading.Event()
    with psworker.connect(address, rank=rank, device="cpu", connect_timeout=60.0) as job:
        model = network()
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
        for x, y in job.batches(data(), batch_size=8, epochs=epochs, seed=3):
            F.cross_entropy(model(x), y).backward()
            timer.wait(pause)
            print(f"computed {len(x)}", flush=True)
            optimizer.step()
            result = optimizer.result
            print(f"decided {result.status} {job.version} {time.monotonic()}", flush=True)
            optimizer.zero_grad()
            while job.version >= pause_at and not until.exists():
                timer.wait(POLL_SECONDS)


def train_gan(
    address: str,
    rank: int | None,
    pause: float = 0.0,
    pause_at: int = 0,
    until: Path | None = None,
    death: Path | None = None,
    dies_within_batch: bool = True,
) -> None:
    """Train two networks with an optimizer each; print each step.

    pause, pause_at, until: as for `train`.
    death: a worker with rank 0 that finds this file removes it, and dies.
    dies_within_batch: it dies between the two steps of a batch; otherwise after them.
    """

    def die_if_asked() -> None:
        if death is not None and not rank and death.exists():
            death.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    timer = threading.Event()
    with psworker.connect(address, rank=rank, device="cpu", connect_timeout=60.0) as job:
        nets = small_gan.networks()
        made = small_gan.handed_over(job, nets)
        loader = job.batches(
            small_gan.data(), batch_size=small_gan.BATCH, epochs=GAN_EPOCHS, seed=3
        )
        for points, noise in loader:
            small_gan.step_discriminator(nets, made, points, noise)
            if dies_within_batch:
                die_if_asked()
            small_gan.step_generator(nets, made, points, noise)
            if not dies_within_batch:
                die_if_asked()
            timer.wait(pause)
            while until is not None and job.version >= pause_at and not until.exists():
                timer.wait(POLL_SECONDS)
            print(f"step {time.monotonic():.3f} {job.version}", flush=True)


def count(
    address: str,
    rank: int | None,
    pushes: int,
    lanes: tuple[Lanes, ...] = ("grpc",),
    faults: str = "",
    seed: int = 0,
    pause: float = 0.0,
) -> None:
    """Push ones until that many pushes of this rank are acknowledged; print the number at the end.

    lanes: by rank, repeated. faults: rules of tests.support.rpc_faults. A fenced worker rejoins as
    a new one; it never learns whether its last push counted.
    """
    chosen = lanes[(rank or 0) % len(lanes)]
    lane_seed = 100 * seed + (rank or 0)
    lane = faulty_lane(address, faults, lane_seed, chosen) if faults else None
    acknowledged = fenced = 0
    timer = threading.Event()
    with counter(
        None if lane else address,
        rank,
        lane=lane,
        lanes=chosen,
        connect_timeout=60.0,
        wait_timeout=120.0,
    ) as client:
        while acknowledged < pushes:
            try:
                result = client.push_pull(ONES) if acknowledged % 2 else client.push(ONES)
            except FencedError as error:
                fenced += 1
                print("fenced:", error, flush=True)
                client.rejoin()
            else:
                assert result.status == "applied", result
                acknowledged += 1
                print("pushed", acknowledged, flush=True)
            timer.wait(pause)
    faulty = sum(lane.faults.counts.values()) if lane else 0
    print(f"acknowledged {acknowledged}, fenced {fenced}, faults {faulty}", flush=True)


def count_over_tls(
    address: str, rank: int | None, security: Path, until: Path, lanes: tuple[Lanes, ...]
) -> None:
    """Push ones without a pause until this file exists; print each acknowledged push.

    security: folder with the files of a client. lanes: by rank.
    """
    use_credentials(client_credentials(security, "worker.token"))
    with counter(address, rank, lanes=lanes[rank or 0], connect_timeout=60.0) as client:
        while not until.exists():
            result = client.push_pull(ONES)
            assert result.status == "applied", result
            print("pushed", result.version, flush=True)
