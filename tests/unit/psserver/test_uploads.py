"""Uploads of policy allreduce: weights and optimizer state in one push, all or nothing."""

import json

import pytest
import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import ByteRange, PartitionPlan
from pscommon.optim.specs import validate_model
from pscommon.parameters.partition import raw
from pscommon.wire.frames import Filler
from pscommon.wire.push import Part, parts_from_proto
from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.staging import Staging, check_upload
from psserver.parameters.store import ParameterStore

MODEL = ModelSpec((TensorSpec("w", (6,), "float32"),), OptimizerSettings("adam"))
STATES = ("exp_avg", "exp_avg_sq")
SPAN = ByteRange(0, 64)
NUMBERS = json.dumps({"steps": {"0": 3}, "scalars": {}})
SETTINGS = validate_model(MODEL).parts()[""].settings


def parts(*states: str) -> list[Part]:
    return [Part((SPAN,)), *(Part((SPAN,), pb.TARGET_STATE, state=name) for name in states)]


def store() -> ParameterStore:
    return ParameterStore(PartitionPlan(MODEL, 1), 0)


def upload(target: ParameterStore, *values: float) -> Staging:
    """Return a complete upload with these values as weights and states."""
    staging = target.allocate_staging((), True, parts(*STATES))
    flat = torch.cat([torch.full((16,), value) for value in values])
    Filler(staging.views).fill(raw(flat))
    staging.state_json = NUMBERS
    return staging


def arrays(source: ParameterStore) -> dict[str, Tensor]:
    return {key.partition("@")[0]: tensor for key, tensor in source.tensors()}


def test_an_upload_replaces_weights_and_all_states() -> None:
    target = store()
    for values in ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)):
        staging = upload(target, *values)
        assert staging.nbytes == 3 * SPAN.nbytes
        target.take_upload(staging)

        found = {name: tensor[0].item() for name, tensor in arrays(target).items()}
        assert found == dict(zip(("weight", *STATES), values, strict=True))
        assert target.steps() == {0: 3}


def test_parts_in_another_order_are_refused() -> None:
    weights, *states = parts(*STATES)

    for given in ([*states, weights], [weights, *states, states[0]]):
        with pytest.raises(InvalidRequestError, match="the weights, then each state once"):
            store().allocate_staging((), True, given)


@pytest.mark.parametrize("span", [ByteRange(0, 32), ByteRange(0, 128)])
def test_a_state_of_another_size_is_refused(span: ByteRange) -> None:
    given = [*parts(), Part((span,), pb.TARGET_STATE, state="exp_avg")]

    with pytest.raises(InvalidRequestError, match="the parts of the push must"):
        store().allocate_staging((), True, given)


def test_a_state_without_a_name_is_refused() -> None:
    message = pb.Part(target=pb.TARGET_STATE, encoding=pb.ENCODING_RAW, ranges=[0, 64])

    with pytest.raises(InvalidRequestError, match="a state without its name"):
        parts_from_proto([message])


@pytest.mark.parametrize(
    ("states", "state_json", "problem"),
    [
        (("exp_avg",), NUMBERS, "it lacks exp_avg_sq"),
        ((*STATES, "momentum_buffer"), NUMBERS, "adam has no momentum_buffer"),
        (STATES, "[]", "cannot read its state"),
        (STATES, '{"steps": {"x": 1}, "scalars": {}}', "cannot read its state"),
    ],
)
def test_an_incomplete_upload_is_refused(
    states: tuple[str, ...], state_json: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        check_upload(SETTINGS, SETTINGS.groups, states, state_json)


def test_an_upload_before_the_first_step_has_no_state() -> None:
    check_upload(SETTINGS, SETTINGS.groups, (), "")


def test_a_scalar_that_is_missing_is_refused() -> None:
    spec = validate_model(ModelSpec(MODEL.tensors, OptimizerSettings("nadam")))
    settings = spec.parts()[""].settings

    with pytest.raises(InvalidRequestError, match="it lacks mu_product of some tensors"):
        check_upload(settings, settings.groups, STATES, NUMBERS)
