"""What ps-run makes of what it hears."""

import pytest

from psworker.run.launcher import find_successor


@pytest.mark.parametrize(
    ("connected", "own", "found"),
    [(True, "h:1", "h:7"), (False, "h:1", ""), (True, "h:7", ""), (True, "", "")],
)
def test_a_server_in_the_place_of_another_is_found_in_the_status(
    connected: bool, own: str, found: str
) -> None:
    """Not one that is not there, not the server itself, and none of a server that never had an
    address.
    """
    rows = [
        {"shard": 0, "address": "h:0", "connected": True},
        {"shard": 1, "address": "h:7", "connected": connected},
    ]

    assert find_successor({"servers": rows}, "s1", own) == found
    assert find_successor({}, "s1", own) == ""
