"""JSON that any parser takes."""

import json
import math
from typing import Any

import pytest

from pscommon.telemetry.strict_json import dumps


def parsed(text: str) -> Any:
    """As a parser reads it that knows nothing of NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_null_wherever_it_is() -> None:
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


def test_the_rest_is_as_json_does_it() -> None:
    document = {"a": [1, None, "é"], "b": {}}

    assert dumps(document, indent=2) == json.dumps(document, indent=2)
    assert dumps({"a": {1}}, default=str) == '{"a": "{1}"}'
    with pytest.raises(TypeError):
        dumps({"a": object()})
