"""The supervisor's decisions, as transcripts: what happens on the left, what ps-run does about
it on the right.
"""

import pytest

from psworker.launch.events import ServerBound
from psworker.launch.outcome import RunOutcome
from psworker.launch.supervisor import BIND_SECONDS, COLLECT_SECONDS, STOP_SECONDS, Supervisor
from tests.support.supervisor_events import STARTED, event, play

WELL = """
begin        | start s0
bound s0     | start s1, start w0, start w1
bound s1     |
exit w1 0    |
exit w0 0    | collect
collected    | stop job
stop ok      |
exit s1 0    |
exit s0 0    | finish done 0
"""


TRANSCRIPTS = {
    "well": WELL,
    "a script that raises ends the run, workers first": STARTED
    + """
exit w0 1    | term w1
exit w1 143  | term s0, term s1
exit s1 0    |
exit s0 0    | finish failed 1 w0
""",
    "a worker killed by a signal is started again": STARTED
    + """
exit w1 -9   | say, start w1 again
exit w0 0    |
exit w1 0    | collect
""",
    "lost servers are worth another try, a mismatch is not": STARTED
    + """
exit w1 20   | say, start w1 again
exit w1 11   | term w0
exit w0 0    | term s0, term s1
exit s0 0    |
exit s1 0    | finish failed 11 w1
""",
    "restarts are counted over all processes": STARTED
    + """
exit w0 -11  | say, start w0 again
exit w1 143  | say, start w1 again
exit w0 137  | term w1
exit w1 143  | term s0, term s1
exit s0 0    |
exit s1 0    | finish failed 137 w0
""",
    "a server that dies takes its weights along": STARTED
    + """
exit s1 -9   | term w0, term w1
exit w0 20   |
exit w1 20   | term s0
exit s0 0    | finish failed 137 s1
""",
    "a server that cannot start is the culprit": """
begin        | start s0
exit s0 10   | finish failed 10 s0
""",
    "another server that cannot start": """
begin        | start s0
bound s0     | start s1, start w0, start w1
exit s1 12   | term w0, term w1
exit w0 143  |
exit w1 143  | term s0
exit s0 143  | finish failed 12 s1
""",
    "Ctrl-C": STARTED
    + """
signal 2     | say, term w0, term w1
exit w0 143  |
exit w1 0    | term s0, term s1
exit s0 0    |
exit s1 0    | finish interrupted 130
""",
    "SIGTERM before anything is bound": """
begin        | start s0
signal 15    | say, term s0
exit s0 -15  | finish interrupted 143
""",
    "a second Ctrl-C kills at once": STARTED
    + """
signal 2     | say, term w0, term w1
signal 2     | kill s0, kill s1, kill w0, kill w1
exit w0 -9   |
exit w1 -9   | term s0, term s1
exit s0 -9   |
exit s1 -9   | finish interrupted 130
""",
    "who does not end within the grace is killed": STARTED
    + """
signal 15    | say, term w0, term w1
exit w0 143  |
after 4.9    |
after 0.1    | kill w1
exit w1 -9   | term s0, term s1
after 4.9    |
after 0.1    | kill s0, kill s1
exit s0 -9   |
exit s1 -9   | finish interrupted 143
""",
    "a server that never opens its port": f"""
begin        | start s0
after {BIND_SECONDS}  | term s0
exit s0 -15  | finish failed 20 s0
""",
    "another process stops the job": STARTED
    + """
exit s0 0    | say
exit s1 0    |
exit w0 0    |
exit w1 0    | finish done 0
""",
    "a worker that is left alone has not done its work": STARTED
    + """
exit s0 0    | say
exit s1 0    |
exit w0 0    |
exit w1 20   | finish failed 20 w1
""",
    "the first server's standby has taken its place": STARTED
    + f"""
exit s0 0    | say
after {10 * STOP_SECONDS} |
exit w0 0    |
exit w1 0    |
after 5.0    | term s1
exit s1 143  | finish done 0
""",
    "a server that was told to end takes its weights along": STARTED
    + """
exit s0 143  | term w0, term w1
exit w0 20   |
exit w1 20   | term s1
exit s1 143  | finish failed 143 s0
""",
    "a server whose standby has taken its place unasked": STARTED
    + """
exit s1 10 h:7 | say
exit w0 0    |
exit w1 0    | collect
collected    | stop job
stop ok      |
exit s0 0    | finish done 0
""",
    "a job that has moved to fewer servers": STARTED
    + """
exit s1 0    | say
exit w0 0    |
exit w1 0    | collect
collected    | stop job
stop ok      |
exit s0 0    | finish done 0
""",
    "workers that take long to notice that the job was stopped": STARTED
    + f"""
exit s1 0    | say
exit s0 0    | say
after {STOP_SECONDS} |
exit w0 0    |
exit w1 0    | finish done 0
""",
    "a script that raises while the job is being stopped": STARTED
    + """
exit s1 0    | say
exit w0 1    | term w1
exit w1 0    | term s0
exit s0 0    | finish failed 1 w0
""",
    "a server dies after the training, before its weights were read": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s1 -9   | term s0
exit s0 0    | finish failed 137 s1
collected    |
""",
    "the servers ended before they were asked for the result": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s0 0    |
exit s1 0    |
collected    | finish done 0
""",
    "reading the result takes too long": STARTED
    + f"""
exit w0 0    |
exit w1 0    | collect
after {COLLECT_SECONDS} | say, stop job
collected    |
exit s0 0    |
exit s1 0    | finish done 0
""",
    "the stop call fails": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
collected    | stop job
stop refused | say, term s0, term s1
exit s0 0    |
exit s1 0    | finish done 0
""",
    "a server that does not stop": STARTED
    + f"""
exit w0 0    |
exit w1 0    | collect
collected    | stop job
stop ok      |
exit s0 0    |
after {STOP_SECONDS} | term s1
exit s1 -15  | finish failed 20 s1
""",
    "a last snapshot that fails": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
collected    | stop job
exit s1 12   | term s0
exit s0 0    | finish failed 12 s1
""",
    "Ctrl-C while the result is read": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
signal 2     | say, term s0, term s1
collected    |
exit s0 0    |
exit s1 0    | finish interrupted 130
""",
}

DURABLE = {
    "with snapshots a killed server is started again": STARTED
    + """
exit s0 -9   | say, start s0 again
bound s0     |
exit w0 0    |
exit w1 0    | collect
""",
    "servers that went back after the workers were done have lost training": STARTED
    + """
exit w0 0    |
exit s1 -9   | say, start s1 again
exit w1 0    |
bound s1     | collect
went back    | stop job
stop ok      |
exit s0 0    |
exit s1 0    | finish failed 12 s1
""",
    "a server that ends before its result is read is restarted, and the result read again": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s1 143  | say, start s1 again
collected    |
bound s1     | collect
collected    | stop job
""",
    "a result that was read before the restart does not count": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s1 143  | say, start s1 again
exit s0 143  | say, start s0 again
bound s1     |
bound s0     | collect
collected    |
went back    | stop job
stop ok      |
exit s0 0    |
exit s1 0    | finish failed 12 s0
""",
    "a server that does not return before its result is read": STARTED
    + f"""
exit w0 0    |
exit w1 0    | collect
exit s1 143  | say, start s1 again
collected    |
after {BIND_SECONDS} | term s0, term s1
exit s0 0    |
exit s1 -15  | finish failed 20 s1
""",
    "a standby takes over before the result is read": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s1 -9 h:7 | say
collected    | stop job
""",
    "with snapshots one that was told to end is started again": STARTED
    + """
exit s1 143  | say, start s1 again
exit s0 143  | say, start s0 again
bound s0     |
bound s1     |
exit w0 0    |
exit w1 0    | collect
""",
    "but not one whose standby has taken its place": STARTED
    + """
exit s1 -9 h:7 | say
exit w0 0    |
exit w1 0    | collect
""",
    "but not one whose data directory is taken": STARTED
    + """
exit s0 10   | term w0, term w1
""",
    "a server killed while it starts": """
begin        | start s0
exit s0 -9   | say, start s0 again
bound s0     | start s1, start w0, start w1
""",
}


@pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS.keys())
def test_transcript(transcript: str) -> None:
    play(transcript, durable=False)


@pytest.mark.parametrize("transcript", DURABLE.values(), ids=DURABLE.keys())
def test_transcript_with_snapshots(transcript: str) -> None:
    play(transcript, durable=True)


def test_the_outcome_names_the_first_failure_and_what_came_before() -> None:
    outcome = play(TRANSCRIPTS["restarts are counted over all processes"], durable=False)

    assert outcome == RunOutcome(
        "failed",
        137,
        "w0",
        137,
        "w0 exited with 137: as if killed by SIGKILL",
        (
            "w0 was killed by SIGSEGV and was restarted",
            "w1 exited with 143: terminated (SIGTERM) and was restarted",
        ),
    )


@pytest.mark.parametrize(
    ("last", "ending"), [("exit s0 0", False), ("signal 2", True), ("exit w0 1", True)]
)
def test_a_run_whose_workers_go_on_is_not_ending(last: str, ending: bool) -> None:
    machine = Supervisor(1, 2, max_restarts=0, durable=False, grace=5.0)
    machine.start(0.0)
    machine.step(ServerBound("s0"), 0.0)
    assert not machine.is_ending

    machine.step(event(last), 0.0)

    assert machine.is_ending == ending
