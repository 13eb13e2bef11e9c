"""psworker.DistributedTraining trains on several workers with one call."""

import functools
import math
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psworker import DistributedTraining, InvalidRequestError
from psworker.data.random_state import reseed
from tests.support.cluster import Cluster
from tests.support.events import events
from tests.support.policies import POLICIES
from tests.support.small_training import (
    DATA,
    INPUTS,
    LABELS,
    Net,
    child_pids,
    make_adam,
)
from tests.support.workers import status, weights_of

KEYS = {
    "model_name",
    "nodes_used",
    "device",
    "status",
    "steps",
    "samples",
    "seconds",
    "final_loss",
    "state_dict",
}


def make_net() -> Net:
    return Net()


def accuracy(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(INPUTS).argmax(1) == LABELS).float().mean())


@pytest.mark.full
def test_three_nodes_train_a_module_and_leave_nothing() -> None:
    model, before, threads = Net(), child_pids(), set(threading.enumerate())

    result = DistributedTraining(servers=2).train_distributed(
        model, DATA, nodes=3, epochs=8, batch_size=10, optimizer=make_adam
    )

    assert set(result) == KEYS
    assert (result["model_name"], result["nodes_used"], result["device"], result["status"]) == (
        "Net",
        3,
        "cpu",
        "done",
    )
    assert (result["steps"], result["samples"]) == (96, 960)
    assert accuracy(model) > 0.9
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, result["state_dict"][name])
    assert child_pids() == before
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert left <= {"abandoned-clients"}, "another thread remains"


@pytest.mark.full
def test_the_servers_of_a_training_ignore_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Variables may describe another job; its data directory would end the second training."""
    for name, value in {
        "PS_DATA_DIR": str(tmp_path),
        "PS_STALENESS": "3",
        "PS_STANDBY_OF": "127.0.0.1:1",
    }.items():
        monkeypatch.setenv(name, value)

    runs = [
        DistributedTraining().train_distributed(Net(), DATA, nodes=1, batch_size=40)
        for _ in range(2)
    ]

    assert [run["steps"] for run in runs] == [3, 3]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("row", [{}, {"policy": "async"}, {"policy": "ssp", "staleness": 2}])
def test_a_simulated_run_is_reproducible(row: dict[str, object]) -> None:
    """With dropout, and on any number of servers."""
    states = []
    for servers in (1, 1, 2):
        training = DistributedTraining(servers, **row)  # type: ignore[arg-type]
        result = training.train_distributed(
            Net(), DATA, nodes=3, epochs=3, batch_size=10, optimizer=make_adam, simulate=True
        )
        assert (result["nodes_used"], result["steps"], result["samples"]) == (3, 36, 360)
        states.append(result["state_dict"])

    # without a barrier the order of events depends on the number of servers
    again = 2 if not row else 1
    for state in states[1 : 1 + again]:
        assert all(torch.equal(state[name], states[0][name]) for name in state)


def test_a_simulated_run_learns() -> None:
    model = Net()
    DistributedTraining().train_distributed(
        model, DATA, nodes=2, epochs=10, batch_size=10, optimizer=make_adam, simulate=True
    )

    assert accuracy(model) > 0.9


@pytest.mark.parametrize("given", [{"epochs": 0}, {"data": (INPUTS[:0], LABELS[:0])}])
def test_a_run_without_steps_has_no_loss(given: dict[str, Any]) -> None:
    result = DistributedTraining().train_distributed(
        Net(), **{"data": DATA, "nodes": 2, "simulate": True} | given
    )

    assert (result["status"], result["steps"], result["samples"]) == ("done", 0, 0)
    assert math.isnan(result["final_loss"])


def test_every_kind_of_argument_is_accepted() -> None:
    """A factory by name, a data set, an optimizer, a user-defined loss."""
    template = Net()
    dataset = torch.utils.data.TensorDataset(INPUTS, INPUTS[:, :2])
    training = DistributedTraining()

    named = training.train_distributed(f"{__name__}:make_net", DATA, nodes=1, simulate=True)
    full_run = training.train_distributed(
        template,
        dataset,
        nodes=2,
        simulate=True,
        loss=nn.L1Loss(),
        optimizer=torch.optim.SGD(template.parameters(), lr=0.1),
    )

    assert named["model_name"] == "Net"
    assert full_run["status"] == "done"


class Quadratic(nn.Module):
    """Has state that is no tensor, and takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.seen: dict[str, int] = {}

    def forward(self, inputs: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        (x, bias) = inputs["x"]
        return self.linear(x) + bias  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = dict(state)


def test_nested_inputs_and_non_tensor_state_are_supported() -> None:
    model, data = (
        Quadratic(),
        [({"x": (x, x[:1])}, label) for x, label in zip(INPUTS, LABELS, strict=True)],
    )

    result = DistributedTraining().train_distributed(
        model, data, nodes=2, batch_size=30, simulate=True
    )

    assert (result["steps"], result["samples"]) == (4, 120)
    assert result["state_dict"]["_extra_state"] == model.seen == {"calls": 2}


def test_a_list_of_two_tensors_is_a_pair() -> None:
    results = [
        DistributedTraining().train_distributed(Net(), data, nodes=1, simulate=True)
        for data in (DATA, list(DATA))
    ]
    assert [result["samples"] for result in results] == [120, 120]
    assert results[0]["final_loss"] == results[1]["final_loss"]


@pytest.mark.parametrize("as_it_is", [False, True])
def test_constructor_values_of_an_optimizer_apply(as_it_is: bool) -> None:
    model, alone = nn.Linear(6, 2), nn.Linear(6, 2)
    alone.load_state_dict(model.state_dict())
    make = functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)
    optimizer = make(alone.parameters())
    nn.functional.cross_entropy(alone(INPUTS), LABELS).backward()
    optimizer.step()

    given = make(model.parameters()) if as_it_is else make
    DistributedTraining().train_distributed(
        model, DATA, nodes=1, batch_size=120, shuffle=False, optimizer=given, simulate=True
    )

    torch.testing.assert_close(model.weight, alone.weight)


@pytest.mark.full
@pytest.mark.parametrize("simulate", [True, False])
def test_the_random_state_of_the_caller_does_not_change(simulate: bool) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), float(np.random.rand()), random.random()]

    model = Net()
    reseed(5)
    expected = draw()
    reseed(5)
    DistributedTraining().train_distributed(model, DATA, nodes=2, batch_size=40, simulate=simulate)

    assert draw() == expected


def test_a_simulation_has_its_own_servers() -> None:
    with pytest.raises(InvalidRequestError, match="simulate=True excludes ps='h:1'"):
        DistributedTraining(ps="h:1").train_distributed(Net(), DATA, simulate=True)


@pytest.mark.parametrize("row", POLICIES.values(), ids=POLICIES)
def test_running_servers_can_be_used_and_continue(
    row: dict[str, Any], cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    """A job is one training: a worker that joins after its end gets its weights and is informed."""
    address = cluster(2, min_workers=2, **row).address
    model = Net()

    result = DistributedTraining(ps=address).train_distributed(
        model, DATA, nodes=2, epochs=2, batch_size=10, optimizer=make_adam
    )

    seen = status(address)
    assert (result["steps"], result["samples"]) == (seen["steps"], seen["samples"]) == (24, 240)
    assert (seen["state"], seen["finished"]) == ("running", 2)
    weights = weights_of(address)
    assert all(
        torch.equal(tensor, torch.from_numpy(weights[name]))
        for name, tensor in model.state_dict().items()
    )

    caplog.clear()
    late = DistributedTraining(ps=address).train_distributed(
        Net(), DATA, 2, False, 2, 10, optimizer=make_adam
    )
    assert (late["steps"], "nothing_trained" in events(caplog)) == (0, True)
    assert all(
        torch.equal(tensor, model.state_dict()[name]) for name, tensor in late["state_dict"].items()
    )
