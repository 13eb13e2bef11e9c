"""A step weighs the samples whose gradient it pushes: batches that a script leaves out do not."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psworker import InvalidRequestError, Job
from psworker.model.gradient_watch import GradientWatch
from psworker.optim.optimizer import ServerOptimizer
from tests.support.push_recorder import PushRecorder, TwoPerUpdate

DATA = torch.arange(32.0)[:, None]
OPTIONS = {"plain": {}, "overlap": {"overlap": True}, "pipeline": {"pipeline": True}}


class Script:
    """A script in whose batches of 4 samples some numbers are left out.

    Attributes:
        job: Its job.
        optimizer: Its optimizer.
        model: Its model.
        client: Records its pushes.
    """

    def __init__(self, client: PushRecorder | None = None, **options: bool) -> None:
        self.client = client or PushRecorder()
        if "pipeline" in options:
            self.client.policy = "async"  # type: ignore[misc]
        self.job, self.model = Job(self.client), nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        plain = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.optimizer: ServerOptimizer = self.job.optimizer(plain, self.model, **options)

    def batches(self, data: Tensor = DATA, **options: Any) -> Any:
        return self.job.batches(data, 4, shuffle=False, **options)

    def backward(self, *batches: Tensor) -> None:
        sum(self.model(batch).mean() for batch in batches).backward()  # type: ignore[union-attr]

    def step(self, *batches: Tensor) -> None:
        self.backward(*batches)
        self.optimizer.step()

    @property
    def pushes(self) -> list[tuple[int, int]]:
        """Samples and number of batches of each push so far."""
        self.job.wait()
        return [(samples, batches) for _, samples, batches in self.client.pushed]


def number(batch: Tensor) -> int:
    return int(batch[0]) // 4


Zero = Callable[[Script], object]
ZEROS: dict[str, Zero] = {
    "optimizer": lambda script: script.optimizer.zero_grad(),
    "optimizer to zeros": lambda script: script.optimizer.zero_grad(set_to_none=False),
    "original": lambda script: script.optimizer.original.zero_grad(),
    "model": lambda script: script.model.zero_grad(),
    "model to zeros": lambda script: script.model.zero_grad(set_to_none=False),
    "by hand": lambda script: [
        p.grad.zero_() for p in script.model.parameters() if p.grad is not None
    ],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
@pytest.mark.parametrize("is_after_step", [False, True])
def test_a_batch_that_is_left_out_has_no_weight(
    zero: Zero, is_after_step: bool, options: dict[str, bool]
) -> None:
    """The first, two in a row, and the last; all of them are committed."""
    script = Script(**options)
    for batch in script.batches():
        if not is_after_step:
            zero(script)
        if number(batch) in (0, 3, 4, 7):
            continue
        script.step(batch)
        if is_after_step:
            zero(script)
    script.step(DATA)

    assert script.pushes == [(4, 2), (4, 1), (4, 3), (4, 1), (1, 1)]


def test_the_last_batch_of_a_pass_has_no_weight_in_the_next_one() -> None:
    script = Script()
    for _ in range(2):
        for batch in script.batches(DATA[:8]):
            if number(batch) == 0:
                script.step(batch)

    assert script.pushes == [(4, 1), (4, 2)]


@pytest.mark.parametrize("ends", ["break", "loop"])
def test_one_loader_with_several_passes(ends: str) -> None:
    script = Script()
    loader = script.batches(DATA[:8])
    for _ in range(2):
        for batch in loader:
            if number(batch) == 1 and ends == "break":
                break
            if number(batch) == 0:
                script.optimizer.zero_grad()
                script.step(batch)

    assert [samples for samples, _ in script.pushes] == [4, 4]


DROPPED = {name: ZEROS[name] for name in ("optimizer", "optimizer to zeros", "original", "model")}


@pytest.mark.parametrize("zero", DROPPED.values(), ids=DROPPED)
def test_a_gradient_that_is_dropped_after_backward_has_no_weight(zero: Zero) -> None:
    """The usual check of the gradient's norm; before, gradients exist from the step before."""
    script = Script()
    for batch in script.batches():
        if number(batch):
            script.backward(batch)
            if number(batch) in (2, 3):
                zero(script)
                continue
            script.optimizer.step()
        else:
            script.step(batch)

    assert [samples for samples, _ in script.pushes] == [4, 4, 4, 4, 4, 4]


def test_a_gradient_that_the_next_iteration_drops_has_no_weight() -> None:
    script = Script()
    for batch in script.batches():
        script.optimizer.zero_grad()
        script.backward(batch)
        if number(batch) in (2, 3):
            continue
        script.optimizer.step()

    assert [samples for samples, _ in script.pushes] == [4] * 6


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_batches_weigh_together(options: dict[str, bool], set_to_none: bool) -> None:
    """Without those that are left out: one in the first step, the last one of the second."""
    script = Script(**options)
    for batch in script.batches():
        if number(batch) not in (1, 7):
            script.backward(batch)
        if number(batch) % 4 == 3:
            script.optimizer.step()
            script.optimizer.zero_grad(set_to_none)

    assert script.pushes == [(12, 4), (12, 4)]


@pytest.mark.parametrize("clip", [lambda grads: torch._foreach_mul_(grads, 0.5), None])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_change_in_place_makes_no_batch_count(
    clip: Callable[[list[Tensor]], None] | None, set_to_none: bool
) -> None:
    """Clipping, or unscaling: the last batch of each step is left out, in the first one too."""
    script = Script()
    for batch in script.batches():
        if number(batch) % 2 == 0:
            script.backward(batch)
            continue
        weights = list(script.model.parameters())
        if clip is None:
            nn.utils.clip_grad_norm_(weights, 0.1)
        else:
            clip([p.grad for p in weights if p.grad is not None])
        script.optimizer.step()
        script.optimizer.zero_grad(set_to_none)

    assert script.pushes == [(4, 2)] * 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_batches_of_two_loaders_weigh_together(set_to_none: bool) -> None:
    script = Script()
    labelled, unlabelled = script.batches(), script.batches(DATA.clone())
    for first, second in zip(labelled, unlabelled, strict=True):
        script.optimizer.zero_grad(set_to_none)
        if number(first) != 2:
            script.step(first, second)

    assert [samples for samples, _ in script.pushes] == [8] * 7


def test_a_loader_that_is_read_less_often_than_another_one() -> None:
    """Each batch of the slow one belongs to two batches of the other one, and to their step."""
    script = Script()
    fast = iter(script.batches())
    for slow in script.batches(DATA[:16].clone()):
        script.optimizer.zero_grad()
        for _ in range(2):
            script.backward(slow, next(fast))
        script.optimizer.step()

    assert [samples for samples, _ in script.pushes] == [12] * 4


def test_a_backward_before_the_first_batch_of_another_loader() -> None:
    script = Script()
    second = iter(script.batches(DATA.clone()))
    for first in script.batches():
        script.optimizer.zero_grad()
        script.backward(first)
        if number(first) % 2:
            script.backward(next(second))
        script.optimizer.step()

    assert [samples for samples, _ in script.pushes] == [4, 8] * 4


def test_gradients_may_be_set_by_hand() -> None:
    script = Script()
    for batch in script.batches():
        for parameter in script.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if number(batch) % 2:
            script.optimizer.step()

    assert [samples for samples, _ in script.pushes] == [8] * 4


def test_a_gradient_of_zeros_weighs_like_others() -> None:
    script = Script()
    for batch in script.batches():
        script.optimizer.zero_grad()
        (script.model(batch) * 0.0).sum().backward()
        script.optimizer.step()

    assert [samples for samples, _ in script.pushes] == [4] * 8


def test_changes_that_nothing_shows_weigh_as_all_batches() -> None:
    """Writes through .data change neither the gradient's identity nor torch's counter."""
    script = Script()
    for parameter in script.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for batch in script.batches():
        for parameter in script.model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.fill_(float(number(batch)))
        script.optimizer.step()

    assert [samples for samples, _ in script.pushes] == [4] * 8


def test_a_gradient_of_one_branch_counts() -> None:
    script = Script()
    unused = nn.Parameter(torch.zeros(3))
    weights = [*script.model.parameters()]
    watch = GradientWatch([unused, *weights])
    watch.mark()
    assert not watch.has_changed()
    weights[-1].sum().backward()
    assert watch.has_changed()


def test_a_gradient_without_a_hook_counts_when_it_is_added_up() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(100)]
    watch = GradientWatch(weights)
    for _ in range(2):
        watch.mark()
        weights[1].sum().backward()
        assert watch.has_changed()
    watch.mark()
    assert not watch.has_changed()
    watch.close()


def test_a_sample_of_many_parameters_is_watched() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2000)]
    watch = GradientWatch(parameters)
    watch.mark()
    for parameter in parameters[1000:1004]:
        parameter.grad = torch.ones(1)

    assert watch.has_changed()
    assert watch.has_gradients()


def test_the_watch_does_not_keep_gradients_alive() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    watch = GradientWatch([parameter])
    parameter.grad = torch.ones(1)
    seen = weakref.ref(parameter.grad)
    watch.mark()
    parameter.grad = None

    assert seen() is None
    assert not watch.has_changed()


def test_the_given_number_of_samples_overrides_the_weight() -> None:
    """As for a collate_fn that leaves samples out."""
    script = Script()
    for batch in script.batches(collate_fn=lambda samples: torch.stack(samples[1:])):
        script.optimizer.zero_grad()
        script.backward(batch)
        script.optimizer.step(samples=len(batch))

    assert script.pushes == [(3, 1)] * 8


def test_a_closure_may_leave_the_weight_to_the_caller() -> None:
    script = Script()
    for batch in script.batches(DATA[:8]):

        def closure(batch: Tensor = batch) -> None:
            script.optimizer.zero_grad()
            script.backward(batch)

        if number(batch):
            script.optimizer.step(closure, samples=7)
        else:
            script.optimizer.step(closure)

    assert script.pushes == [(4, 1), (7, 1)]


@pytest.mark.parametrize("samples", [0, -1, 1.5, True])
def test_a_weight_out_of_range_is_refused(samples: Any) -> None:
    script = Script()
    script.backward(DATA)
    with pytest.raises(InvalidRequestError, match=r"samples="):
        script.optimizer.step(samples=samples)


@pytest.mark.parametrize("zero_first", [False, True])
def test_a_batch_counts_for_all_of_several_optimizers_or_for_none(zero_first: bool) -> None:
    """The second one steps with every second batch; two batches are left out."""
    client = PushRecorder()
    job, networks = Job(client), [nn.Linear(1, 1), nn.Linear(1, 1)]
    first, second = (
        job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, name=name)
        for name, net in zip("ab", networks, strict=True)
    )
    for batch in job.batches(DATA, 4, shuffle=False):
        if zero_first:
            first.zero_grad()
            second.zero_grad()
        if number(batch) in (2, 5):
            continue
        networks[0](batch).mean().backward()
        first.step()
        first.zero_grad()
        if number(batch) % 2:
            networks[1](batch).mean().backward()
            second.step()
            second.zero_grad()

    weights = [(name, samples) for name, samples, _ in client.pushed]
    a = ("a", 4)
    assert weights == [a, a, ("b", 8), a, ("b", 4), a, a, a, ("b", 12)][: len(weights)]
    assert len(weights) == 9


def test_a_step_without_a_gradient_in_a_global_batch_adds_zeros() -> None:
    """As a step that GradScaler leaves out. Two batches make an update."""
    script = Script(TwoPerUpdate())
    for batch in script.batches():
        script.optimizer.zero_grad()
        if number(batch) not in (2, 5):
            script.backward(batch)
        script.optimizer.step()

    assert script.pushes == [(8, 2)] * 4


def test_a_global_batch_without_the_step_of_a_batch_within_it() -> None:
    script = Script(TwoPerUpdate())
    for batch in script.batches():
        script.optimizer.zero_grad()
        if number(batch) == 2:
            continue
        script.step(batch)

    assert script.pushes == [(8, 2), (4, 2), (8, 2), (8, 2)]
