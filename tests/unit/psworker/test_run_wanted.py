"""How ps-run follows the number of workers that the job wants: transcripts of its supervisor."""

import pytest

from psworker.run.launcher import find_leaving
from tests.support.supervisor_events import STARTED, play

TRANSCRIPTS = {
    "the number of workers follows the job": STARTED
    + """
wanted 4     | message, start w2, start w3
wanted 2     | message, term w2, term w3
exit w3 0    |
wanted 3     | message, start w3 again
exit w2 0    |
exit w0 0    |
exit w3 0    |
exit w1 0    | collect
""",
    "the same number of workers changes nothing": STARTED
    + """
wanted 2     |
""",
    "a worker that the servers have asked to leave is not replaced by another one that leaves": (
        STARTED
        + """
wanted 3     | message, start w2
wanted 2 w0  |
exit w0 0    |
wanted 1     | message, term w2
exit w2 0    |
exit w1 0    | collect
"""
    ),
    "a worker that fails while it leaves does not fail the run": STARTED
    + """
wanted 1     | message, term w1
exit w1 143  | message
exit w0 0    | collect
""",
    "the result is read after the last worker has left": STARTED
    + """
wanted 1     | message, term w1
exit w0 0    |
exit w1 0    | collect
""",
    "a worker that was started later is restarted like the others": STARTED
    + """
wanted 3     | message, start w2
exit w2 -9   | message, start w2 again
exit w0 0    |
exit w1 0    |
exit w2 0    | collect
""",
    "Ctrl-C ends workers that were started later": STARTED
    + """
wanted 3     | message, start w2
signal 2     | message, term w0, term w1, term w2
wanted 9     |
""",
    "no worker starts once the result is read": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
wanted 5     |
""",
}


@pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS.keys())
def test_transcript(transcript: str) -> None:
    play(transcript, durable=False)


def row(pid: int, rank: int, state: str, draining: bool, host: str = "h") -> dict[str, object]:
    return {"pid": pid, "rank": rank, "state": state, "draining": draining, "host": host}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([row(11, 1, "active", True)], {"w1"}),
        ([row(11, 1, "left", True)], {"w1"}),  # its process has not ended yet
        ([row(11, 1, "active", False)], set()),
        ([row(90, 1, "active", True)], {"w1"}),  # the pid of a rank of the group
        ([row(90, 1, "left", True)], set()),  # an earlier process of w1
        ([row(11, 7, "left", True, host="another")], set()),
    ],
)
def test_workers_that_the_servers_ask_to_leave_are_found_in_the_status(
    rows: list[dict[str, object]], found: set[str]
) -> None:
    processes = {"s1": ("h", 11), "w0": ("h", 10), "w1": ("h", 11)}

    assert find_leaving({"workers": rows}, processes) == found
