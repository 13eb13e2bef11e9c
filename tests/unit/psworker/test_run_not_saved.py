"""What ps-run makes of a shard 0 that ends with 15: transcripts as in test_run_supervise."""

import pytest

from tests.support.supervisor_events import STARTED, play

TRANSCRIPTS = {
    "final weights that are not saved": STARTED
    + """
exit w1 0    |
exit w0 0    | collect
collected    | stop job
stop ok      |
exit s0 15   |
exit s1 0    | finish done 15
""",
    "final weights that are not saved, of a job that was stopped": STARTED
    + """
exit s0 15   | say
exit w1 0    |
exit w0 0    |
exit s1 0    | finish done 15
""",
    "a signal stays, saved or not": STARTED
    + """
signal 15    | say, term w0, term w1
exit w0 143  |
exit w1 143  | term s0, term s1
exit s0 15   |
exit s1 0    | finish interrupted 143
""",
    "a failure stays, saved or not": STARTED
    + """
exit w1 1    | term w0
exit w0 143  | term s0, term s1
exit s0 15   |
exit s1 0    | finish failed 1 w1
""",
}


@pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS.keys())
def test_transcript_of_a_run_that_is_not_saved(transcript: str) -> None:
    play(transcript, durable=True)
