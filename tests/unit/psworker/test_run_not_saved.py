"""Exit code 15 of shard 0 in ps-run: transcripts as in test_run_supervise."""

import pytest

from tests.support.supervisor_events import STARTED, play

TRANSCRIPTS = {
    "the final weights are not saved": STARTED
    + """
exit w1 0    |
exit w0 0    | collect
collected    | stop job
stop ok      |
exit s0 15   |
exit s1 0    | finish done 15
""",
    "the final weights of a stopped job are not saved": STARTED
    + """
exit s0 15   | message
exit w1 0    |
exit w0 0    |
exit s1 0    | finish done 15
""",
    "a signal has precedence over exit code 15": STARTED
    + """
signal 15    | message, term w0, term w1
exit w0 143  |
exit w1 143  | term s0, term s1
exit s0 15   |
exit s1 0    | finish interrupted 143
""",
    "a failure has precedence over exit code 15": STARTED
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
