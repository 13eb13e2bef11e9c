"""Calls of job.optimizer that are refused when a job has several optimizers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError
from psworker import Job
from tests.support.push_recorder import PushRecorder, two

SGD = torch.optim.SGD


@pytest.fixture
def client() -> PushRecorder:
    return PushRecorder()


@pytest.fixture
def job(client: PushRecorder) -> Iterator[Job]:
    with Job(client) as made:
        yield made


def refusal(job: Job, *arguments: Any, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        job.optimizer(*arguments, **options)
    return str(raised.value)


def test_parameters_of_two_optimizers_are_refused(job: Job) -> None:
    net = nn.Linear(2, 3)
    job.optimizer(SGD([net.weight], lr=0.1), net, name="a")

    assert refusal(job, SGD(net.parameters(), lr=0.1), net, name="b") == (
        "job.optimizer failed: a parameter of shape [3, 2] in group 0 of optimizer 'b' belongs to "
        "optimizer 'a', too. Try: each parameter in one optimizer"
    )
    job.optimizer(SGD([net.bias], lr=0.1), net, name="b")
    job.pull()


@pytest.mark.parametrize("name", ["", "a.b", None, 3])
def test_a_name_that_cannot_be_one_is_refused(job: Job, name: Any) -> None:
    net = nn.Linear(1, 1)

    assert refusal(job, SGD(net.parameters(), lr=0.1), net, name=name) == (
        f"job.optimizer failed: {name!r} is no valid name. Try: a text without dots"
    )


def test_a_second_optimizer_of_a_name_is_refused(job: Job) -> None:
    two(job)
    net = nn.Linear(1, 1)

    assert refusal(job, SGD(net.parameters(), lr=0.1), net, name="b") == (
        "job.optimizer failed: the job has an optimizer 'b' already. Try: another name"
    )


def test_a_name_after_the_first_pull_is_refused(job: Job) -> None:
    first, net = nn.Linear(1, 1), nn.Linear(1, 1)
    job.optimizer(SGD(first.parameters(), lr=0.1), first, name="a")
    job.pull()

    assert refusal(job, SGD(net.parameters(), lr=0.1), net, name="c") == (
        "job.optimizer failed: 'c' comes too late: the first pull or save has registered the "
        "model. Try: all calls of job.optimizer before it"
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda job, optimizer: optimizer.step(),
        lambda job, optimizer: next(iter(job.batches(torch.zeros(4, 1), 2))),
    ],
    ids=["step", "pass"],
)
@pytest.mark.parametrize("names", [("a", "c"), ("a", "a"), ("default", "default")])
def test_an_optimizer_for_a_later_stage_is_refused(
    job: Job, use: Callable[[Job, torch.optim.Optimizer], object], names: tuple[str, str]
) -> None:
    """A name for each would not help: it comes too late."""
    first = nn.Linear(1, 1)
    optimizer = job.optimizer(SGD(first.parameters(), lr=0.1), first, name=names[0])
    first(torch.ones(1, 1)).sum().backward()
    use(job, optimizer)

    assert refusal(job, SGD(first.parameters(), lr=0.1), first, name=names[1]) == (
        "job.optimizer failed: training has begun with other optimizers. Try: at the start, list "
        "all parameters and switch requires_grad and lr later; or begin a training: job.close(), "
        "then psworker.connect()"
    )


@pytest.mark.parametrize("names", [("default", "a"), ("a", "default"), ("default", "default")])
def test_an_optimizer_without_a_name_is_the_only_one(job: Job, names: tuple[str, str]) -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    job.optimizer(SGD(first.parameters(), lr=0.1), first, name=names[0])

    assert refusal(job, SGD(second.parameters(), lr=0.1), second, name=names[1]) == (
        "job.optimizer failed: an optimizer without a name is the only one of its job. Try: a "
        'name for each, such as job.optimizer(..., name="generator")'
    )


@pytest.mark.parametrize("options", [{"overlap": True}, {"pipeline": True}, {}], ids=str)
def test_overlap_and_pipeline_are_refused(
    job: Job, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not options:
        monkeypatch.setenv("PS_OVERLAP", "1")
    net = nn.Linear(1, 1)

    assert refusal(job, SGD(net.parameters(), lr=0.1), net, name="a", **options) == (
        "several optimizers exclude overlap and pipeline. Try: leave out overlap, pipeline and "
        "PS_OVERLAP"
    )


def test_a_refused_optimizer_leaves_the_job_usable(job: Job, client: PushRecorder) -> None:
    net, other = nn.Linear(1, 1), nn.Linear(1, 1)
    refusal(job, torch.optim.LBFGS(net.parameters()), net, name="a")
    refusal(job, SGD(net.parameters(), lr=0.1), other, name="a")
    job.optimizer(SGD(net.parameters(), lr=0.1), net, name="a")
    job.pull()

    assert list(client.plan.spec.optimizers) == ["a"]


def test_the_scheduler_of_an_unknown_optimizer_is_refused(job: Job) -> None:
    first, _ = two(job)
    scheduler = torch.optim.lr_scheduler.StepLR(SGD(first.parameters(), lr=0.1), 1)

    with pytest.raises(InvalidRequestError, match="scheduler's optimizer was not given to the job"):
        job.resume(scheduler)


def test_the_script_s_own_optimizers_refuse_to_step(job: Job) -> None:
    net = nn.Linear(1, 1)
    sgd = SGD(net.parameters(), lr=0.1)
    job.optimizer(sgd, net, name="a")

    with pytest.raises(InvalidRequestError, match="was given to the job"):
        sgd.step()
