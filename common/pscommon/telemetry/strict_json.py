"""JSON for people's tools: only what the standard has, so that any parser takes it."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def dumps(
    document: object, indent: int | None = None, default: Callable[[Any], Any] | None = None
) -> str:
    """As json.dumps, but a number that is not finite becomes null, and every key of an object a
    string.
    """
    return json.dumps(_strict(document), indent=indent, default=default, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value
