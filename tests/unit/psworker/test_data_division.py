"""Which ranks of a group share data, and how their batches weigh."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError, MismatchError
from psworker import Job
from psworker.client.local_client import LocalClient
from psworker.core.group_place import GroupPlace
from psworker.core.results import CollectiveCall
from psworker.group.client import combined
from psworker.group.data_division import DataDivision, place_in
from psworker.model.gradient_watch import GradientWatch
from psworker.session.consumed_batches import NextStep
from tests.support.groups import as_group


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
    with pytest.raises(InvalidRequestError, match=r"this rank has part 0 of 2, and by .* of"):
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


def test_each_reduction_weighs_the_batches_since_the_last_one() -> None:
    """Also where several are reduced before one step; a closed job weighs ranks alike."""
    watch = GradientWatch([nn.Parameter(torch.ones(1))])
    step = NextStep(watch)
    assert step.share(2) == 1 / 2
    step.receive(0, 3, 6, 0)
    assert step.share(2) == 1 / 2
    step.receive(0, 2, 3, 0)
    assert step.share(2) == step.share(2) == 2 / 3, "of each module of the model"
    step.receive(0, 4, 8, 0)
    step.receive(0, 2, 3, 0)
    assert step.share(2) == 6 / 11
    assert (step.samples, step.all_samples) == (11, 20)
    step.forget_samples()
    assert step.share(2) == 1 / 2


@pytest.mark.parametrize("rows", [12, 9], ids=["even", "uneven"])
def test_gradients_of_batches_that_ranks_share_differently_are_refused(rows: int) -> None:
    """Rank 0 has 3 of 6 samples, and then 2 of 3: no weight makes the mean of both batches."""

    def script(job: Job, rank: int) -> float:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        optimizer = job.optimizer(torch.optim.SGD(layer.parameters(), lr=1), layer)
        for (x,) in job.batches((torch.arange(float(rows))[:, None],), 3, shuffle=False):
            (layer(x).mean() / 2).backward()
        optimizer.step()
        return layer.weight.item()

    if rows == 12:
        assert as_group(2, LocalClient, script) == [-5.5] * 2
    else:
        with pytest.raises(InvalidRequestError, match="drop_last=True"):
            as_group(2, LocalClient, script)


def test_a_mesh_needs_a_group() -> None:
    with Job(LocalClient()) as job, pytest.raises(InvalidRequestError, match="mesh="):
        job.batches((torch.ones(32, 3),), batch_size=8, mesh=mesh([0], 1))


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


def test_the_ranks_of_a_pipeline_do_not_pass_different_values() -> None:
    """Each stage with samples counts like a rank with the whole model, which it has not."""
    calls = [CollectiveCall("all_reduce", {"x": x}, 4) for x in (0, 3)]
    assert combined(calls, [0, 0]).values == {"x": 0}, "ranks of a tensor-parallel plan"
    assert combined(calls, [0, 1], has_stages=True).values == {"x": 1.5}
    with pytest.raises(MismatchError, match="pass samples=0") as caught:
        combined(calls, [0, 0], has_stages=True)
    assert caught.value.reason == "COLLECTIVE_MISMATCH"
