"""Settings of each policy."""

from typing import Any

POLICIES: dict[str, dict[str, Any]] = {
    "sync": {"policy": "sync"},
    "ssp 2": {"policy": "ssp", "staleness": 2},
    "async": {"policy": "async"},
}
