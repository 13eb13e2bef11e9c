"""Parameter groups as JSON keep every bit and are checked."""

import json
import math

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.optim.specs import groups_from_json, groups_to_json, validate

LIKE = validate(OptimizerSettings("adam", ({"lr": 0.1}, {"lr": 1 / 3, "betas": (0.1, 0.7)})))


def test_groups_survive_json_bit_by_bit() -> None:
    assert groups_from_json(groups_to_json(LIKE.groups), LIKE) == LIKE.groups


def test_values_missing_in_json_are_those_of_the_job() -> None:
    one, two = groups_from_json('[{"lr": 2}, {}]', LIKE)

    assert one == {**LIKE.groups[0], "lr": 2.0}
    assert two == LIKE.groups[1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("nonsense", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "no JSON list of objects"),
        ("[1, 2]", "no JSON list of objects"),
        ("[{}]", "adam has 1 parameter groups"),
        ('[{}, {"lr": NaN}]', "adam, group 1: lr is nan"),
        ('[{}, {"lr": "x"}]', "not a finite number"),
        ('[{}, {"__class__": "x"}]', "unknown hyper-parameter '__class__'"),
        ('[{}, {"betas": [0.1, [0.2]]}]', "not a finite number"),
    ],
)
def test_json_is_validated(text: str, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        groups_from_json(text, LIKE)


def test_values_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        groups_to_json(({"lr": math.inf},))


def test_json_has_plain_types_only() -> None:
    assert json.loads(groups_to_json(({"lr": 0.1, "betas": (0.9, 0.99)},))) == [
        {"lr": 0.1, "betas": [0.9, 0.99]}
    ]
