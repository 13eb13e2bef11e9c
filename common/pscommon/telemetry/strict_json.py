"""JSON that conforms to the standard, so that every parser accepts it."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def dumps(
    document: object,
    indent: int | None = None,
    default: Callable[[Any], Any] | None = None,
    separators: tuple[str, str] | None = None,
) -> str:
    """Return JSON like json.dumps; numbers that are not finite become null, keys strings."""
    return json.dumps(
        _strict(document), indent=indent, default=default, separators=separators, allow_nan=False
    )


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value
