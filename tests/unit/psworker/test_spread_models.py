"""Models that are spread over the ranks of a group, without servers and without torch's processes.

The ranks are threads, and each has a pipeline stage.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError, MismatchError
from psworker import Job
from psworker.client.local_client import LocalClient
from psworker.core.group_place import GroupPlace
from psworker.core.results import CollectiveCall
from psworker.group.client import combined
from psworker.group.data_division import DataDivision, place_in
from psworker.model.gradient_watch import GradientWatch
from tests.support.groups import as_group

ROWS = torch.randn(32, 3, generator=torch.Generator().manual_seed(5))


def model() -> nn.ModuleDict:
    """Return a model whose layers each get a gradient of their own."""
    layers = nn.ModuleDict(
        {"a": nn.Linear(3, 4), "b": nn.BatchNorm1d(3), "c": nn.Linear(3, 2, bias=False)}
    )
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)
    return layers


def stage_of(rank: int, size: int = 2) -> Any:
    """Return what PipelineStage offers: stage 0 has layer a, stage 1 the others."""
    layers = model()
    for name in {0: "bc", 1: "a"}[rank]:
        del layers[name]
    return SimpleNamespace(submod=layers, stage_index=rank, group_size=size)


def train(layers: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
    optimizer.zero_grad()
    sum(layer(rows).square().mean() for layer in layers.children()).backward()
    optimizer.step()


def adam(layers: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(layers.parameters(), lr=0.1)


def expected(clip_norm: float | None = None) -> dict[str, Tensor]:
    layers = model()
    optimizer = adam(layers)
    if clip_norm is not None:
        norm = clip_norm
        optimizer.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_norm_(layers.parameters(), norm) and None
        )
    for number in range(4):
        train(layers, optimizer, ROWS[number * 8 : number * 8 + 8])
    return layers.state_dict()


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_stages_train_like_the_whole_model(tmp_path: Path, clip_norm: float | None) -> None:
    """All ranks get all rows; names, the norm of the gradient and files are those of the whole."""

    def script(job: Job, rank: int) -> None:
        stage = stage_of(rank)
        optimizer = job.optimizer(adam(stage.submod), stage, clip_norm=clip_norm)
        for (rows,) in job.batches((ROWS,), batch_size=8, shuffle=False):
            assert len(rows) == 8
            train(stage.submod, optimizer, rows)
        if rank == 1:
            job.save(tmp_path / "end.safetensors")
        job.barrier()

    as_group(2, LocalClient, script)
    found = load_file(tmp_path / "end.safetensors")
    torch.testing.assert_close(found, expected(clip_norm), rtol=1e-6, atol=1e-7)


def test_several_optimizers_on_each_stage() -> None:
    """One step of the one leaves the tensors of the other alone, on all ranks."""

    def script(job: Job, rank: int) -> tuple[Tensor, Tensor]:
        layers = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 1, bias=False)})
        others = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 1, bias=False)})
        for each in (layers, others):
            nn.init.ones_(each[f"layer{rank}"].weight)
        first, _ = (
            job.optimizer(
                torch.optim.SGD(each.parameters(), lr=0.5),
                SimpleNamespace(submod=each, stage_index=rank, group_size=2),
                name=name,
            )
            for name, each in (("d", layers), ("g", others))
        )
        for each in (layers, others):
            each[f"layer{rank}"](torch.ones(1, 2)).sum().backward()
        first.step()
        return layers[f"layer{rank}"].weight.detach(), others[f"layer{rank}"].weight.detach()

    for changed, unchanged in as_group(2, LocalClient, script):
        assert changed.tolist() == [[0.5, 0.5]]
        assert unchanged.tolist() == [[1, 1]]


def test_a_name_on_two_stages_is_an_error_on_all_ranks() -> None:
    def script(job: Job, rank: int) -> None:
        layers = nn.Sequential(nn.Linear(3, 3))
        stage = SimpleNamespace(submod=layers, stage_index=rank, group_size=2)
        with pytest.raises(MismatchError, match=r"0\.weight is on the pipeline stages 0 and 1"):
            job.optimizer(adam(layers), stage)

    as_group(2, LocalClient, script)


def test_a_stage_beside_a_plain_model_is_an_error_on_all_ranks() -> None:
    def script(job: Job, rank: int) -> None:
        stage: Any = stage_of(rank)
        with pytest.raises(MismatchError, match="plain"):
            job.optimizer(adam(stage.submod), stage if rank else stage.submod)

    as_group(2, LocalClient, script)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """As one that was made before fully_shard, which replaces the parameters."""

    def script(job: Job, rank: int) -> None:
        with pytest.raises(InvalidRequestError, match="make the optimizer after them"):
            job.optimizer(adam(stage_of(rank).submod), stage_of(rank))

    as_group(2, LocalClient, script)


def test_a_stage_needs_a_group() -> None:
    with Job(LocalClient()) as job, pytest.raises(InvalidRequestError, match="--group"):
        job.optimizer(adam(stage_of(0).submod), stage_of(0))


def test_a_model_without_values_is_refused() -> None:
    def script(job: Job, rank: int) -> None:
        stage = stage_of(rank)
        stage.submod.to("meta")
        with pytest.raises(InvalidRequestError, match="to_empty"):
            job.optimizer(adam(stage.submod), stage)

    as_group(2, LocalClient, script)


def test_weights_that_one_rank_changes_stay_for_an_evaluation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All ranks keep theirs, and the next step overwrites them with a warning."""

    def script(job: Job, rank: int) -> tuple[float, float]:
        stage = stage_of(rank)
        optimizer = job.optimizer(adam(stage.submod), stage)
        train(stage.submod, optimizer, ROWS)
        weight = next(stage.submod.parameters())
        if rank == 1:
            with torch.no_grad():
                weight.fill_(7)
        with torch.no_grad():
            for _ in job.batches((ROWS,), batch_size=8):
                pass
        unchanged = weight.flatten()[0].item()
        train(stage.submod, optimizer, ROWS)
        return unchanged, weight.flatten()[0].item()

    _, (unchanged, after) = as_group(2, LocalClient, script)
    assert unchanged == 7
    assert after < 3
    assert caplog.text.count("weights_changed_by_script") == 1
    assert "b.weight" in caplog.text


def test_buffers_of_a_stage_stay_as_the_script_has_left_them() -> None:
    """A pass without a newer version keeps them; a buffer that was replaced counts, too."""

    def script(job: Job, rank: int) -> list[int]:
        layers = nn.ModuleDict({f"layer{rank}": nn.Linear(1, 1)})
        layers.register_buffer(f"count{rank}", torch.zeros(1, dtype=torch.int64))
        stage: Any = SimpleNamespace(submod=layers, stage_index=rank, group_size=2)
        optimizer = job.optimizer(adam(layers), stage)
        found = []
        for _ in range(2):
            setattr(layers, f"count{rank}", getattr(layers, f"count{rank}") + 1 + rank)
            train(layers, optimizer, torch.ones(1, 1))
            getattr(layers, f"count{rank}").add_(10)
            job.pull()
            found.append(int(getattr(layers, f"count{rank}")))
        return found

    assert as_group(2, LocalClient, script) == [[1, 2], [2, 4]]


# ---- which ranks share data ------------------------------------------------------------------


def mesh(coordinates: list[int] | None, *shape: int) -> Any:
    return SimpleNamespace(
        get_coordinate=lambda: coordinates, shape=shape, size=lambda: torch.Size(shape).numel()
    )


def test_a_mesh_names_the_part_of_a_batch() -> None:
    assert place_in(mesh([1], 2)) == GroupPlace(1, 2)
    assert place_in(mesh([1, 0], 2, 3)) == GroupPlace(3, 6)
    for wrong in (mesh(None, 2), "dp"):
        with pytest.raises(InvalidRequestError, match="no device mesh with this rank"):
            place_in(wrong)


ALONE, FIRST, ALL = GroupPlace(0, 1), GroupPlace(0, 2), GroupPlace(2, 4)


def division_of(*steps: GroupPlace | str | None) -> DataDivision:
    """Return the division after models with these places; a text is a call of job.batches."""
    division = DataDivision(ALL)
    for step in steps:
        if isinstance(step, str):
            division.divide(None)
        else:
            division.expect(step)
    return division


def test_models_say_which_ranks_share_data() -> None:
    assert division_of().divide(None) == ALL
    assert division_of(ALL).divide(None) == ALL
    assert division_of(ALONE).divide(None) == ALONE
    assert division_of().divide(FIRST) == FIRST, "a plain model says nothing"
    assert division_of("batches", ALL).place == ALL


def test_a_mesh_says_it_for_all_loaders() -> None:
    division = division_of(None)
    assert division.divide(FIRST) == FIRST
    assert division.divide(None) == FIRST
    division.expect(None)
    with pytest.raises(InvalidRequestError, match="the same mesh in all calls"):
        division.divide(ALL)


@pytest.mark.parametrize("models", [[None], [ALONE, ALL]], ids=["two dimensions", "different"])
def test_a_mesh_may_be_missing(models: list[GroupPlace | None]) -> None:
    with pytest.raises(InvalidRequestError, match="does not say which ranks"):
        division_of(*models).divide(None)
    assert division_of(*models).divide(FIRST) == FIRST


@pytest.mark.parametrize("place", [ALONE, ALL], ids=["tensor parallel", "DDP"])
def test_a_mesh_that_contradicts_the_model_is_refused(place: GroupPlace) -> None:
    with pytest.raises(InvalidRequestError, match="this mesh divides batches among 2 ranks"):
        division_of(place).divide(FIRST)


@pytest.mark.parametrize("place", [ALONE, None], ids=["tensor parallel", "two dimensions"])
def test_batches_that_were_divided_before_the_model_are_refused(place: GroupPlace | None) -> None:
    with pytest.raises(InvalidRequestError, match="before job"):
        division_of("batches", place)


def test_a_backward_counts_though_its_gradients_come_later() -> None:
    """As with set_requires_gradient_sync(False) of FSDP2."""
    watch = GradientWatch([nn.Parameter(torch.ones(1))])
    watch.mark()
    assert not watch.has_changed()
    watch.record_backward()
    assert watch.has_changed()
    watch.mark()
    assert not watch.has_changed()


def test_a_mesh_needs_a_group() -> None:
    with Job(LocalClient()) as job, pytest.raises(InvalidRequestError, match="mesh="):
        job.batches((ROWS,), batch_size=8, mesh=mesh([0], 1))


def test_a_plain_model_may_share_data_too() -> None:
    """Ranks 0 and 1 have the rows of the first half, and a row counts once."""

    def script(job: Job, rank: int) -> tuple[list[float], float]:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        optimizer = job.optimizer(torch.optim.SGD(layer.parameters(), lr=1), layer)
        rows, found = torch.arange(6.0)[:, None], []
        shared = mesh([rank // 2], 2)
        for (x,) in job.batches((rows,), batch_size=3, shuffle=False, mesh=shared):
            found = x.flatten().tolist()
            layer(x).mean().backward()
            optimizer.step()
        return found, layer.weight.item()

    assert as_group(4, LocalClient, script) == [([0, 1, 2], -2.5)] * 2 + [([3, 4, 5], -2.5)] * 2


def test_of_ranks_with_the_same_data_one_counts_in_all_reduce() -> None:
    """The loss of a pipeline is on its last stage: the others pass no samples."""
    calls = [CollectiveCall("all_reduce", {"x": x}, n) for x, n in ((0, 0), (4, 2), (0, 0), (1, 1))]
    assert combined(calls, [0, 0, 1, 1]) == CollectiveCall("all_reduce", {"x": 3}, 3)
    equal = [CollectiveCall("all_reduce", {"x": 2}, 5)] * 2
    assert combined(equal, [0, 0]) == equal[0]
