"""JSON that every parser accepts."""

import json
import math
from typing import Any

import pytest

from pscommon.telemetry.strict_json import dumps


def parsed(text: str) -> Any:
    """Parse like a parser that does not know NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_non_finite_numbers_are_null_at_any_depth() -> None:
    document = {
        "loss": math.nan,
        "rows": [math.inf, (-math.inf, 0.5)],
        "of": {"each": {"x": math.nan}},
        "n": 3,
        "ok": True,
    }

    assert parsed(dumps(document)) == {
        "loss": None,
        "rows": [None, [None, 0.5]],
        "of": {"each": {"x": None}},
        "n": 3,
        "ok": True,
    }


def test_every_key_is_a_string() -> None:
    assert parsed(dumps({(1, 2): 3, 4: 5, math.nan: 6})) == {"(1, 2)": 3, "4": 5, "nan": 6}


def test_other_values_are_encoded_as_by_json() -> None:
    document = {"a": [1, None, "é"], "b": {}}

    assert dumps(document, indent=2) == json.dumps(document, indent=2)
    assert dumps({"a": {1}}, default=str) == '{"a": "{1}"}'
    with pytest.raises(TypeError):
        dumps({"a": object()})
