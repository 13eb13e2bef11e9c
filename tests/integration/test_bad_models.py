"""Models, initial weights and pushes that servers refuse; the job continues."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pscommon.core.errors import (
    InvalidRequestError,
    MismatchError,
    NonFiniteError,
    UnsupportedOptimizerError,
)
from psworker import OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.refusals import refused
from tests.support.workers import (
    ONES,
    connected,
    count,
    counted,
    counter,
    joined,
    network,
    status,
    together,
    weights_of,
)

Make = Callable[..., Cluster]
SGD = OptimizerSpec("sgd", lr=1.0)
ZEROS = {name: np.zeros_like(one) for name, one in ONES.items()}


# ---- models --------------------------------------------------------------------------------------

SMALL = np.zeros(3, np.float32)
OTHER_MODELS: dict[str, tuple[dict[str, Any], OptimizerSpec, list[str]]] = {
    "another shape": (
        {"a": np.zeros((40, 3), np.float32), "b": ZEROS["b"]},
        SGD,
        ["a: float32[40, 3] trainable, the job has float32[3, 40] trainable"],
    ),
    "another dtype": (
        {"a": ZEROS["a"], "b": np.zeros(100)},
        SGD,
        ["b: float64[100] trainable, the job has float32[100] trainable"],
    ),
    "one missing, one more": (
        {"a": ZEROS["a"], "c": SMALL},
        SGD,
        ["b: missing; the job has float32[100] trainable", "c: not in the job's model"],
    ),
    "another optimizer": (
        ZEROS,
        OptimizerSpec("adam", lr=1.0),
        ["optimizer: adam, the job has sgd"],
    ),
    "other hyper-parameters": (
        ZEROS,
        OptimizerSpec("sgd", lr=0.5, momentum=0.9),
        [
            "optimizer group 0: lr=0.5, the job has 1.0",
            "optimizer group 0: momentum=0.9, the job has 0.0",
        ],
    ),
}


@pytest.mark.parametrize(
    ("model", "optimizer", "differences"), OTHER_MODELS.values(), ids=OTHER_MODELS.keys()
)
def test_another_model_or_optimizer_than_the_jobs_is_refused(
    cluster: Make, model: dict[str, Any], optimizer: OptimizerSpec, differences: list[str]
) -> None:
    """The error lists the tensors that differ, and the job continues without this worker."""
    address = cluster(2).address
    with counter(address) as client:
        with (
            refused(MismatchError, 11, "MODEL_MISMATCH", *differences),
            connected(address) as other,
        ):
            other.register(model, optimizer)

        count(client, 2)
        assert counted(client.pull()) == 2


def test_an_unknown_optimizer_is_refused(cluster: Make) -> None:
    address, model = cluster(1).address, network()

    for unsupported in (
        torch.optim.LBFGS(model.parameters()),
        type("Mine", (torch.optim.Adam,), {})(model.parameters()),
    ):
        with (
            refused(
                UnsupportedOptimizerError,
                2,
                "UNSUPPORTED_OPTIMIZER",
                type(unsupported).__name__,
                "Adagrad",
            ),
            joined(address) as job,
        ):
            job.optimizer(unsupported, model)

    assert status(address)["model"] is None


def test_a_tensor_name_that_no_file_can_hold_is_refused(cluster: Make) -> None:
    """A snapshot could be written, but never exported. The next worker may bring another model."""
    address = cluster(1).address
    with (
        refused(InvalidRequestError, 2, "INVALID_REQUEST", "__metadata__", "Try: rename"),
        connected(address) as client,
    ):
        client.register({"a": ZEROS["a"], "__metadata__": SMALL}, SGD)

    assert status(address)["model"] is None
    with counter(address) as client:
        count(client)


def test_non_finite_initial_weights_are_refused(cluster: Make) -> None:
    address = cluster(2).address
    with (
        refused(NonFiniteError, 14, "NON_FINITE", "worker 1", "tensor b"),
        connected(address) as client,
    ):
        client.register({"a": ZEROS["a"], "b": np.full(100, np.inf, np.float32)}, SGD)

    with counter(address) as client:  # the next worker may register
        count(client)


def test_an_uploader_may_replace_non_finite_weights(cluster: Make) -> None:
    """The first decision does not apply to other workers, and no worker waits for them."""
    with connected(cluster(2).address) as client:
        with pytest.raises(NonFiniteError, match=r"^worker 1 .*: tensor b$"):
            client.register({"a": ZEROS["a"], "b": np.full(100, np.inf, np.float32)}, SGD)

        client.register(ZEROS, SGD)
        count(client)


# ---- pushes --------------------------------------------------------------------------------------

BAD_PUSHES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "unknown tensor": ({**ONES, "zz": SMALL}, "UNKNOWN_TENSOR", ["zz"]),
    "wrong shape": ({**ONES, "b": SMALL}, "WRONG_SHAPE", ["b", "(100,)", "(3,)"]),
    "wrong dtype": ({**ONES, "b": np.ones(100)}, "WRONG_DTYPE", ["b", "float32", "float64"]),
}


@pytest.mark.parametrize(
    ("gradients", "reason", "texts"), BAD_PUSHES.values(), ids=BAD_PUSHES.keys()
)
def test_a_gradient_of_another_shape_is_refused(
    cluster: Make, gradients: dict[str, Any], reason: str, texts: list[str]
) -> None:
    with counter(cluster(2).address) as client:
        count(client)

        with refused(InvalidRequestError, 2, reason, *texts):
            client.push(gradients)

        count(client)
        assert counted(client.pull()) == 2


@pytest.mark.every(2)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_non_finite_gradient_changes_no_shard(cluster: Make, name: str, value: float) -> None:
    """The shard that holds it rejects it, and so do all; the round closes with the worker's next
    push.
    """
    address = cluster(3, min_workers=2, bad_gradients="skip").address
    bad = {key: one.copy() for key, one in ONES.items()}
    bad[name].flat[-1] = value

    def careless() -> None:
        with counter(address, rank=0) as client:
            result = client.push(bad)
            assert result.status == "rejected"
            assert result.reason.startswith(f"NON_FINITE: worker {client.worker} (rank 0, ")
            assert result.reason.endswith(f"tensor {name}")
            assert counted(client.pull()) == 0
            count(client)

    def careful() -> None:
        with counter(address, rank=1) as client:
            count(client)

    together(careless, careful)

    assert counted(weights_of(address)) == 1
    assert status(address)["pushes"]["rejected"] == 1
