"""How ps-run finds the standby that has replaced a server."""

import pytest

from psworker.run.launcher import find_successor


@pytest.mark.parametrize(
    ("connected", "own", "found"),
    [(True, "h:1", "h:7"), (False, "h:1", ""), (True, "h:7", ""), (True, "", "")],
)
def test_the_server_that_replaced_another_is_found_in_the_status(
    connected: bool, own: str, found: str
) -> None:
    """It must be connected and have another address; a server without an address has none."""
    rows = [
        {"shard": 0, "address": "h:0", "connected": True},
        {"shard": 1, "address": "h:7", "connected": connected},
    ]

    assert find_successor({"servers": rows}, "s1", own) == found
    assert find_successor({}, "s1", own) == ""
