"""Each contender runs one small turn; contenders check the bytes that they moved.

The loopback interface also counts bytes of other processes, so tests check lower bounds only.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import link
from benchmarks.contenders.exchange import check_weights
from benchmarks.networks import NETWORKS, dataset, differentiate, network
from benchmarks.product import LANES
from benchmarks.rounds import Entry, measure
from benchmarks.scale import TINY
from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from benchmarks.speaker import ROOT, Measurements, Speaker
from benchmarks.works import entrants, training
from benchmarks.works.entrants import job, peer
from psworker.session.step_stats import PHASES

NBYTES = 400_000
TINY_SETUP = Setup(NBYTES, pieces=2)
TENSORFLOW = ROOT / ".venv-tf/bin/python"


def turns(entry: Entry, *words: str) -> list[Measurements]:
    with Speaker(entry.command) as speaker:
        speaker.wait_until_ready()
        return [measure(speaker, word) for word in words]


def turn(entry: Entry) -> Measurements:
    return turns(entry, entry.word)[0]


@pytest.mark.parametrize(
    ("kind", "lane"),
    [*(("exchange", lane) for lane in LANES), ("arrays", "stream"), ("modules", "shm")],
)
def test_workers_of_paramserver(kind: str, lane: str) -> None:
    """Over the network all bytes move twice; in shared memory the server maps them."""
    measured = turn(job("ours", Setup(NBYTES, pieces=2, lanes=lane), kind))

    assert measured["seconds"] > 0
    assert measured["server_memory"] > NBYTES
    if lane != "shm":
        assert measured["loopback"] > 2 * NBYTES
        assert measured["server_shared"] == 0
    else:
        assert measured["server_shared"] > 2 * NBYTES


def test_training_phases_add_up_to_the_step() -> None:
    measured = turn(job("ours", Setup(NBYTES, pieces=3, lanes=LANES[-1]), "training"))

    phases = [value for name, value in measured.items() if name.startswith("phase.")]
    assert len(phases) == len(PHASES)
    assert sum(phases) == pytest.approx(measured["seconds"], rel=0.2)


def test_two_workers_and_two_servers() -> None:
    measured = turn(job("ours", Setup(NBYTES, optimizer="adam", servers=2, workers=2)))

    assert measured["seconds"] > 0
    assert measured["loopback"] > 4 * NBYTES


def test_three_clients_in_one_process() -> None:
    """Each client pushes; nothing is pulled."""
    measured = turn(job("ours", Setup(NBYTES, policy="async", clients=3), "crowd"))

    assert measured["loopback"] > 3 * NBYTES


def test_pull_latency_during_pushes() -> None:
    """The pushing worker makes progress meanwhile."""
    setup = Setup(NBYTES, optimizer="adam", workers=2, policy="async", pieces=5)

    idle, busy = turns(peer("ours", "tail", setup), "idle", "busy")

    assert 0 < idle["seconds"] <= idle["p99"]
    assert 0 < busy["seconds"] <= busy["p99"]
    assert busy["pushes_per_second"] > 0
    assert "pushes_per_second" not in idle


def test_grpc_stream() -> None:
    assert turn(peer("peer", "grpc_stream", TINY_SETUP))["loopback"] > 2 * NBYTES


def test_grpc_unary_call() -> None:
    full, empty = turns(
        peer("peer", "grpc_unary", Setup(50_000, model="1", pieces=20)), "go", "empty"
    )

    assert full["loopback"] > 100_000
    assert empty["seconds"] > 0


def test_grpc_streams_of_two_workers() -> None:
    """The server's CPU time has a resolution of 10 ms, so it may be 0."""
    measured = turn(peer("peer", "stream_crowd", Setup(NBYTES, workers=2, pieces=2)))

    assert measured["loopback"] > 2 * 2 * NBYTES
    assert measured["server_cpu"] >= 0


@pytest.mark.parametrize(("kind", "workers"), [("reduce", 2), ("reduce", 3), ("adam", 2)])
def test_gloo_reduces(kind: str, workers: int) -> None:
    """A sum of N processes moves each byte at least 2 (N - 1) times."""
    setup = Setup(NBYTES, optimizer="adam", workers=workers)

    assert turn(peer("peer", "gloo", setup, kind))["loopback"] > 2 * (workers - 1) * NBYTES


def test_training_beside_ddp() -> None:
    """Both train the same network. DDP moves each gradient twice."""
    nbytes = 4 * training.NUMBERS["small"]
    setup = Setup(
        nbytes, "1", "adam", pieces=3, workers=2, batch=4, lanes=LANES[-1], network="small"
    )

    assert turn(job("ours", setup, "script"))["server_shared"] > 0
    for kind in ("ddp", "ddp_plain"):
        assert turn(peer("peer", "gloo", setup, kind))["loopback"] > 2 * nbytes


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_their_size(name: str) -> None:
    """They can be differentiated, too."""
    model = network(name)
    differentiate(model, dataset()[:2])

    assert sum(parameter.numel() for parameter in model.parameters()) == training.NUMBERS[name]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_shared_memory_copy() -> None:
    assert turn(peer("peer", "shared_copy", TINY_SETUP))["seconds"] > 0


@pytest.mark.parametrize(("kind", "least"), [("best", 0), ("tcp", 2 * NBYTES)])
def test_torch_rpc(kind: str, least: int) -> None:
    measured = turn(peer("peer", "torch_rpc", TINY_SETUP, kind))

    assert measured["seconds"] > 0
    assert measured["loopback"] >= least


@pytest.mark.skipif(
    not TENSORFLOW.exists(), reason="no environment with TensorFlow; make bench-tf makes one"
)
def test_tensorflow_in_its_own_network() -> None:
    """Its loopback interface counts no other bytes."""
    scale = replace(TINY, tensorflow=str(TENSORFLOW))
    (entry,) = entrants.tensorflow(scale, TINY_SETUP, "worker")

    for measured in turns(entry, "worker", "coordinator"):
        assert 2 * NBYTES < measured["loopback"] < 3 * NBYTES


def test_transfer_over_a_slow_link() -> None:
    """2 MB at 50 Mbit/s take 0.28 s each way, less the initial burst. The namespaces are
    removed.
    """
    if reason := link.missing():
        pytest.skip(reason)
    setup = Setup(2_000_000, batch=1)
    with link.SlowLink(50) as ends:
        names = {ends.server, ends.worker}
        command = entrants.command("distant", setup.to_json(), ends.server, ends.worker)
        measured = turn(Entry("ours", command, "transfer"))

    assert 0.5 < measured["seconds"] < 5
    assert not names & set(os.listdir("/run/netns"))


def test_wrong_weights_are_an_error() -> None:
    """Weights that moved too little or too often mean that a contender did not do its work."""
    setup = Setup(NBYTES)
    check_weights(np.full(3, -0.5, np.float32), setup, 5)

    for wrong in (np.zeros(3, np.float32), np.full(3, -0.6, np.float32)):
        with pytest.raises(RuntimeError, match="after 5 updates weights are"):
            check_weights(wrong, setup, 5)


def test_shapes_have_the_requested_size_and_number() -> None:
    large, many = shapes("resnet", 100_000_000), shapes("1000", 40_000_000)

    assert (len(large), len(many)) == (160, 1000)
    assert sum(shape[0] * 4 for shape in many.values()) == 40_000_000
    assert 99_000_000 < sum(shape[0] * 4 for shape in large.values()) <= 100_000_000
    with pytest.raises(ValueError, match="too few"):
        shapes("resnet", 1000)
