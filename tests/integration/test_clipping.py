"""clip_norm clips like DistributedDataParallel with clip_grad_norm_: the mean gradient of all
workers.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import psworker
from pscommon.core.data_loop import LoopSpec
from pscommon.core.model_spec import OptimizerSettings
from pscommon.snapshot import weights_sha256
from psworker import DistributedTraining, InvalidRequestError, Job, MismatchError
from tests.support.cluster import Cluster
from tests.support.small_gpt import loss_of, small_gpt, text
from tests.support.training_threads import real, simulated
from tests.support.workers import until

Make = Callable[..., Cluster]
Optimizer = Callable[[Any], torch.optim.Optimizer]

SAMPLES, BATCH, EPOCHS, SEED = 128, 16, 5, 5
CLIP = 1.0
DATA = text(SAMPLES)
ZEROS, ONES = np.zeros(100, np.float32), np.ones(100, np.float32)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model, also of one from transformers."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


def script(
    make: Optimizer = sgd,
    model: nn.Module | None = None,
    batch: int = BATCH,
    epochs: int = EPOCHS,
    **options: Any,
) -> Callable[[Job], tuple[dict[str, Tensor], list[float]]]:
    """Return the weights of a worker's script in the end, and its losses."""
    given = model or small_gpt()

    def train(job: Job) -> tuple[dict[str, Tensor], list[float]]:
        mine, losses = copy.deepcopy(given), []
        optimizer = job.optimizer(make(mine.parameters()), mine, **{"clip_norm": CLIP, **options})
        for tokens in job.batches(DATA, batch, epochs, seed=SEED, reseed=False):
            loss = loss_of(logits_of(mine(tokens)), tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        job.wait()
        return {name: value.detach().clone() for name, value in mine.state_dict().items()}, losses

    return train


def plain(
    make: Optimizer = sgd,
    model: nn.Module | None = None,
    batch: int = 2 * BATCH,
    clip: float | None = CLIP,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Return the result of one process with the double batch, and the norms before clipping."""
    mine, losses, norms = copy.deepcopy(model or small_gpt()), [], []
    optimizer = make(mine.parameters())
    for tokens in batches(batch):
        loss = loss_of(logits_of(mine(tokens)), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(
            mine.parameters(), clip if clip is not None else float("inf")
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return {name: value.detach() for name, value in mine.state_dict().items()}, losses, norms


def batches(size: int) -> Iterator[Tensor]:
    loop = LoopSpec(0, SAMPLES, size, EPOCHS, seed=SEED)
    for number in range(loop.total):
        yield DATA[torch.from_numpy(loop.indices(number).copy())]


def distance(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(
        float((mine[name] - value).abs().max())
        for name, value in theirs.items()
        if value.is_floating_point()
    )


def digest(weights: dict[str, Tensor]) -> str:
    return weights_sha256({name: value.numpy() for name, value in weights.items()})


@pytest.mark.every(3)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_gpt_on_two_workers_equals_one_process_with_the_double_batch(
    cluster: Make, shards: int
) -> None:
    """Within 1e-5: losses and weights, after 20 steps most of which were clipped."""
    weights, losses, norms = plain()
    assert sum(norm > CLIP for norm in norms) >= 5
    assert distance(weights, plain(clip=None)[0]) > 0.01

    (first, mine), (second, others) = real(cluster(shards, min_workers=2).address, 2, script())

    assert digest(first) == digest(second)
    assert distance(first, weights) <= 1e-5
    assert [(a + b) / 2 for a, b in zip(mine, others, strict=True)] == pytest.approx(
        losses, rel=1e-5
    )


@pytest.mark.full
@pytest.mark.parametrize("make", [sgd, adamw])
def test_gpt2_of_transformers_on_two_workers_equals_one_process(
    cluster: Make, make: Optimizer
) -> None:
    """AdamW in float64: it makes full steps from rounding errors, such as the gradients of the
    keys' biases.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=97,
        n_positions=24,
        n_embd=48,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).to(
        torch.float64 if make is adamw else torch.float32
    )
    weights, losses, norms = plain(make, model)
    assert max(norms) > CLIP

    (first, mine), (_, others) = real(cluster(2, min_workers=2).address, 2, script(make, model))

    assert distance(first, weights) <= 1e-5
    assert [(a + b) / 2 for a, b in zip(mine, others, strict=True)] == pytest.approx(
        losses, rel=1e-5
    )


def test_adamw_on_two_workers_equals_one_process(cluster: Make) -> None:
    model = small_gpt().double()
    weights, _, norms = plain(adamw, model, clip=0.5)
    assert min(norms) > 0.5

    (first, _), _ = real(cluster(2, min_workers=2).address, 2, script(adamw, model, clip_norm=0.5))

    assert distance(first, weights) <= 1e-5


@pytest.mark.full
def test_every_run_gives_the_same_bytes(cluster: Make) -> None:
    """Over gRPC, step by step, with more threads and through overlap."""
    digests = {digest(weights) for weights, _ in simulated(2, script(), shards=2)}
    for settings in ({}, {}, {"threads": 3}):
        digests |= {
            digest(weights)
            for weights, _ in real(cluster(2, min_workers=2, **settings).address, 2, script())
        }
    overlapped = real(cluster(2, min_workers=2).address, 2, script(overlap=True))
    digests |= {digest(weights) for weights, _ in overlapped}

    assert len(digests) == 1


def test_clip_grad_norm_acts_on_each_workers_own_gradient(cluster: Make) -> None:
    """This differs from clip_norm."""

    def train(job: Job) -> dict[str, Tensor]:
        model = small_gpt()
        optimizer = job.optimizer(sgd(model.parameters()), model)
        for tokens in job.batches(DATA, BATCH, EPOCHS, seed=SEED, reseed=False):
            loss_of(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    first, _ = real(cluster(min_workers=2).address, 2, train)

    assert distance(first, plain()[0]) > 1e-4


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "settings",
    [{"policy": "sync"}, {"policy": "async"}, {"policy": "ssp", "staleness": 1}],
    ids=str,
)
@pytest.mark.parametrize("shards", [1, 3])
def test_one_worker_equals_plain_torch_under_every_policy(
    settings: dict[str, Any], shards: int
) -> None:
    """Each push alone is clipped, by the norm that the shards reported with it."""
    ((weights, _),) = simulated(1, script(batch=2 * BATCH), shards=shards, **settings)

    assert distance(weights, plain()[0]) <= 1e-5


def test_a_pipelined_step_is_clipped(cluster: Make) -> None:
    """Each update is no longer than learning rate times clip norm."""
    steps: list[Tensor] = []

    def train(job: Job) -> None:
        model = small_gpt()
        optimizer = job.optimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, pipeline=True, clip_norm=1e-3
        )
        for tokens in job.batches(DATA, BATCH, seed=SEED, reseed=False):
            loss_of(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            job.wait()
            steps.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    real(cluster(2, policy="async").address, 1, train)

    moves = [float((after - before).norm()) for before, after in pairwise(steps)]
    assert moves == pytest.approx([1e-3] * len(moves), rel=1e-2)


def test_batches_of_one_update_are_clipped_together() -> None:
    """With --global-batch the mean of the whole update is clipped, not a worker's part of it."""
    ((weights, _),) = simulated(1, script(), shards=2, global_batch=2 * BATCH)

    assert distance(weights, plain()[0]) <= 1e-5


def test_gradients_of_gradscaler_are_clipped_unscaled() -> None:
    def train(job: Job) -> dict[str, Tensor]:
        model = small_gpt()
        optimizer = job.optimizer(sgd(model.parameters()), model, clip_norm=CLIP)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for tokens in job.batches(DATA, 2 * BATCH, EPOCHS, seed=SEED, reseed=False):
            scaler.scale(loss_of(model(tokens), tokens)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    (weights,) = simulated(1, train)

    assert distance(weights, plain()[0]) <= 1e-5


def test_parameters_without_a_gradient_and_frozen_ones_do_not_count() -> None:
    def train(job: Job) -> dict[str, Tensor]:
        model = nn.ModuleDict(
            {"gpt": small_gpt(), "idle": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)}
        )
        trained = [*model["gpt"].parameters(), *model["idle"].parameters()]
        optimizer = job.optimizer(sgd(trained), model, clip_norm=CLIP)
        for tokens in job.batches(DATA, BATCH, EPOCHS, seed=SEED, reseed=False):
            loss_of(model["gpt"](tokens), tokens).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.detach().clone() for name, value in model["gpt"].state_dict().items()}

    first, second = simulated(2, train, shards=2)

    assert distance(first, plain()[0]) <= 1e-5
    assert digest(first) == digest(second)


def test_without_servers_clip_norm_equals_clip_grad_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")
    with psworker.connect() as job:
        weights, losses = script(batch=2 * BATCH)(job)
    theirs, others, _ = plain()

    assert distance(weights, theirs) == 0.0
    assert losses == others


def test_train_distributed_passes_clip_norm_on() -> None:
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    moved = []
    for clip_norm in (None, 1e-3):
        model = nn.Linear(4, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        DistributedTraining(servers=2).train_distributed(
            model,
            (data, data.sum(1, keepdim=True)),
            nodes=2,
            batch_size=16,
            simulate=True,
            clip_norm=clip_norm,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        )
        moved.append(float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm()))

    assert moved[1] == pytest.approx(1e-3, rel=1e-2)
    assert moved[0] > 0.1


def test_a_client_of_arrays_sets_clip_norm_with_the_optimizer(cluster: Make) -> None:
    with psworker.Client(cluster(2).address) as client:
        client.register({"w": ZEROS}, psworker.OptimizerSpec("sgd", lr=1.0, clip_norm=0.5))
        client.push({"w": ONES})

        assert np.linalg.norm(client.pull()["w"]) == pytest.approx(0.5, rel=1e-5)
    assert psworker.OptimizerSpec("sgd", clip_norm=1).clip_norm == 1.0


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_resumed_job_may_have_another_clip_norm(
    cluster: Make, tmp_path: Path, policy: str
) -> None:
    """Servers whose snapshot has none may get a push before they know the clip norm; they measure
    it.
    """
    moved = []
    for clip_norm in (None, 0.5, 0.25):
        servers = cluster(2, data_dir=tmp_path, policy=policy)
        with psworker.Client(servers.address) as client:
            client.register(
                {"w": ZEROS}, psworker.OptimizerSpec("sgd", lr=1.0, clip_norm=clip_norm)
            )
            before = client.pull()["w"].copy()
            client.push({"w": ONES})
            moved.append(float(np.linalg.norm(client.pull()["w"] - before)))
        servers.stop()

    assert moved == pytest.approx([10.0, 0.5, 0.25], rel=1e-5)


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_an_invalid_clip_norm_is_refused(clip_norm: Any) -> None:
    def train(job: Job) -> None:
        model = nn.Linear(1, 1)
        job.optimizer(sgd(model.parameters()), model, clip_norm=clip_norm)

    with pytest.raises(
        InvalidRequestError,
        match=r"^clip_norm=.* is not valid",
    ):
        simulated(1, train)
    with pytest.raises(InvalidRequestError, match="clip_norm="):
        psworker.OptimizerSpec("sgd", clip_norm=clip_norm)


def test_workers_with_different_clip_norms_are_refused(cluster: Make) -> None:
    address = cluster(min_workers=2).address

    def train(job: Job) -> None:
        model = nn.Linear(1, 1)
        until(lambda: job.rank == 0 or registered(address), "the first worker's model")
        job.optimizer(sgd(model.parameters()), model, clip_norm=[1.0, 2.0][job.rank])

    with pytest.raises(MismatchError, match=r"clip_norm=2\.0, the job has 1\.0"):
        real(address, 2, train)


def registered(address: str) -> bool:
    with psworker.Client(address, observe=True) as client:
        return bool(client.status()["model"])


def test_a_model_without_clip_norm_has_its_original_description() -> None:
    assert "clip_norm" not in OptimizerSettings("sgd").as_dict()
