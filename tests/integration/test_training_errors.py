"""Errors of DistributedTraining: arguments, factories, the script, failed workers and Ctrl-C."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psworker import DistributedTraining, InvalidRequestError, NonFiniteError
from tests.support.programs import descendants, programs_in, wait_for_exit
from tests.support.small_training import (
    DATA,
    INPUTS,
    LABELS,
    FailingDataset,
    Net,
    child_pids,
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": [INPUTS]}, "pair of tensors"),
        ({"data": [INPUTS, LABELS, LABELS]}, "pair of tensors"),
        ({"data": (INPUTS, LABELS[:5])}, "different numbers of rows"),
        ({"data": (INPUTS.numpy(), LABELS.numpy())}, "has ndarray"),
        ({"data": [{"x": INPUTS[0], "y": LABELS[0]}]}, "not a pair, but a dict"),
        ({"data": [(INPUTS[0], {"y": LABELS[0]})] * 2}, "no default loss"),
        ({"optimizer": "adam"}, "optimizer cannot be 'adam'"),
        ({"optimizer": list}, "optimizer made a list"),
        ({"nodes": 2.5}, "nodes=2.5 is not valid"),
        ({"nodes": "3"}, "nodes='3' is not valid"),
        ({"data": DataLoader(TensorDataset(*DATA))}, "data cannot be a DataLoader"),
        ({"loss": "mse"}, "loss cannot be 'mse'"),
        ({"loss": nn.CrossEntropyLoss}, "loss cannot be <class"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"a tensor of shape \[64\]"),
        ({"loss": lambda output, target: 0.5}, "but a float"),
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        DistributedTraining().train_distributed(
            **{"model": Net(), "data": DATA, "nodes": 1, "simulate": True} | given
        )


def test_allreduce_is_refused() -> None:
    """The servers of a training have tokens, and workers exchange gradients without any."""
    training = DistributedTraining(policy="allreduce")

    with pytest.raises(InvalidRequestError, match="policy 'allreduce' is not valid"):
        training.train_distributed(nn.Linear(6, 2), DATA, nodes=1)


def test_a_loss_that_uses_the_given_model_is_refused() -> None:
    """Its gradients would be in that module, while copies of it train without them."""
    model = nn.Linear(6, 2)

    def penalized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) + model.weight.square().sum()

    with pytest.raises(InvalidRequestError, match="each node trains a copy"):
        DistributedTraining().train_distributed(model, DATA, loss=penalized, simulate=True)
    penalized(model(INPUTS), LABELS).backward()

    assert model.weight.grad is not None


def broken_factory() -> nn.Module:
    raise AttributeError("inside the factory")


def test_an_error_of_the_factory_is_raised_unchanged() -> None:
    with pytest.raises(AttributeError, match="inside the factory"):
        DistributedTraining().train_distributed(f"{__name__}:broken_factory", DATA)


@pytest.mark.parametrize("model", ["", ":make", "module:", "module"])
def test_an_incomplete_name_of_a_factory_is_refused(model: str) -> None:
    with pytest.raises(InvalidRequestError, match="is missing"):
        DistributedTraining().train_distributed(model, DATA)


@pytest.mark.parametrize(
    "model", ["no_such_module:make", f"{__name__}:nothing", f"{__name__}:child_pids"]
)
def test_the_name_of_a_missing_factory_is_shown(model: str) -> None:
    with pytest.raises(InvalidRequestError, match=model.split(":")[1]):
        DistributedTraining().train_distributed(model, DATA, simulate=True)


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="model cannot be a NoneType"):
        DistributedTraining().train_distributed(None, DATA)  # type: ignore[arg-type]


def test_training_without_a_node_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="nodes=0"):
        DistributedTraining().train_distributed(Net(), DATA, nodes=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_missing_gpus_are_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="sees 0 GPUs"):
        DistributedTraining().train_distributed(Net(), DATA, use_gpus=True)


@pytest.mark.parametrize("simulate", [True, False])
def test_an_error_of_the_user_is_raised_once(simulate: bool) -> None:
    before = child_pids()

    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("my loss")

    with pytest.raises(ZeroDivisionError, match="my loss"):
        DistributedTraining().train_distributed(
            Net(), DATA, nodes=2, loss=broken, simulate=simulate
        )
    assert child_pids() == before


@pytest.mark.full
@pytest.mark.parametrize("simulate", [True, False])
def test_when_one_node_fails_the_others_stop(simulate: bool) -> None:
    data, before = FailingDataset(at=100), child_pids()

    with pytest.raises(FileNotFoundError, match=r"sample\.png"):
        DistributedTraining().train_distributed(
            Net(), data, nodes=2, batch_size=10, simulate=simulate
        )

    assert data.asked < 1000
    assert child_pids() == before


@pytest.mark.full
def test_a_gradient_that_ends_the_job_ends_all_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """The servers end at once, and no worker waits for their restart."""
    began = time.monotonic()

    with pytest.raises(NonFiniteError, match=r"tensor 0\.weight"):
        DistributedTraining().train_distributed(
            Net(), (INPUTS * torch.nan, LABELS), nodes=3, batch_size=60
        )

    assert time.monotonic() - began < 30, caplog.text


ENDLESS = """
import faulthandler
from psworker import DistributedTraining
from tests.support.small_training import FailingDataset, Net

class ReportingDataset(FailingDataset):
    def __getitem__(self, index):
        if self.asked == 100:
            print("trains", flush=True)
            faulthandler.dump_traceback_later(40)  # shows where the script hangs
        return super().__getitem__(index)

training = DistributedTraining(servers=2)
training.train_distributed(Net(), ReportingDataset(at=0), nodes=2, batch_size=10)
"""


@pytest.mark.full
def test_ctrl_c_ends_the_training_and_its_servers(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with programs_in(tmp_path) as programs:
        programs.script(ENDLESS)
        script = programs.start("python", "train.py", PYTHONPATH=f"{root}:{root / 'common'}")
        script.wait_for("trains")
        # the script never writes temporary files
        assert list(programs.temporary.iterdir()) == []
        servers = descendants(script.pid)

        script.send_beside_main(signal.SIGINT)

        assert script.wait() == -signal.SIGINT
        assert script.err.count("KeyboardInterrupt") == 1
        assert len(servers) >= 2
        assert all(wait_for_exit(pid) for pid in servers)
