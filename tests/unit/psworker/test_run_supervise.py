"""The decisions of ps-run's supervisor as transcripts: events on the left, actions on the right."""

import pytest

from psworker.supervision.decisions import RunOutcome
from psworker.supervision.supervisor import BIND_SECONDS, COLLECT_SECONDS, STOP_SECONDS, Supervisor
from tests.support.supervisor_events import STARTED, event, play

SUCCESS = """
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
    "a successful run": SUCCESS,
    "a failed script ends the run, workers first": STARTED
    + """
exit w0 1    | term w1
exit w1 143  | term s0, term s1
exit s1 0    |
exit s0 0    | finish failed 1 w0
""",
    "a worker killed by a signal is restarted": STARTED
    + """
exit w1 -9   | message, start w1 again
exit w0 0    |
exit w1 0    | collect
""",
    "a worker is restarted after lost servers but not after a mismatch": STARTED
    + """
exit w1 20   | message, start w1 again
exit w1 11   | term w0
exit w0 0    | term s0, term s1
exit s0 0    |
exit s1 0    | finish failed 11 w1
""",
    "restarts of all processes are counted together": STARTED
    + """
exit w0 -11  | message, start w0 again
exit w1 143  | message, start w1 again
exit w0 137  | term w1
exit w1 143  | term s0, term s1
exit s0 0    |
exit s1 0    | finish failed 137 w0
""",
    "without snapshots a killed server fails the run": STARTED
    + """
exit s1 -9   | term w0, term w1
exit w0 20   |
exit w1 20   | term s0
exit s0 0    | finish failed 137 s1
""",
    "the first server fails to start": """
begin        | start s0
exit s0 10   | finish failed 10 s0
""",
    "the second server fails to start": """
begin        | start s0
bound s0     | start s1, start w0, start w1
exit s1 12   | term w0, term w1
exit w0 143  |
exit w1 143  | term s0
exit s0 143  | finish failed 12 s1
""",
    "Ctrl-C": STARTED
    + """
signal 2     | message, term w0, term w1
exit w0 143  |
exit w1 0    | term s0, term s1
exit s0 0    |
exit s1 0    | finish interrupted 130
""",
    "SIGTERM before the first server is bound": """
begin        | start s0
signal 15    | message, term s0
exit s0 -15  | finish interrupted 143
""",
    "a second Ctrl-C kills all processes": STARTED
    + """
signal 2     | message, term w0, term w1
signal 2     | kill s0, kill s1, kill w0, kill w1
exit w0 -9   |
exit w1 -9   | term s0, term s1
exit s0 -9   |
exit s1 -9   | finish interrupted 130
""",
    "processes are killed after the grace period": STARTED
    + """
signal 15    | message, term w0, term w1
exit w0 143  |
after 4.9    |
after 0.1    | kill w1
exit w1 -9   | term s0, term s1
after 4.9    |
after 0.1    | kill s0, kill s1
exit s0 -9   |
exit s1 -9   | finish interrupted 143
""",
    "a server that does not open its port is terminated": f"""
begin        | start s0
after {BIND_SECONDS}  | term s0
exit s0 -15  | finish failed 20 s0
""",
    "servers exit with 0 because the job was stopped": STARTED
    + """
exit s0 0    | message
exit s1 0    |
exit w0 0    |
exit w1 0    | finish done 0
""",
    "a worker fails after the servers have ended": STARTED
    + """
exit s0 0    | message
exit s1 0    |
exit w0 0    |
exit w1 20   | finish failed 20 w1
""",
    "a standby replaces the first server; the last server is terminated": STARTED
    + f"""
exit s0 0    | message
after {10 * STOP_SECONDS} |
exit w0 0    |
exit w1 0    |
after 5.0    | term s1
exit s1 143  | finish done 0
""",
    "without snapshots a server that exits after SIGTERM fails the run": STARTED
    + """
exit s0 143  | term w0, term w1
exit w0 20   |
exit w1 20   | term s1
exit s1 143  | finish failed 143 s0
""",
    "a standby replaces a failed server": STARTED
    + """
exit s1 10 h:7 | message
exit w0 0    |
exit w1 0    | collect
collected    | stop job
stop ok      |
exit s0 0    | finish done 0
""",
    "a reshard ends the second server": STARTED
    + """
exit s1 0    | message
exit w0 0    |
exit w1 0    | collect
collected    | stop job
stop ok      |
exit s0 0    | finish done 0
""",
    "workers end long after the job was stopped": STARTED
    + f"""
exit s1 0    | message
exit s0 0    | message
after {STOP_SECONDS} |
exit w0 0    |
exit w1 0    | finish done 0
""",
    "a script fails while the job is being stopped": STARTED
    + """
exit s1 0    | message
exit w0 1    | term w1
exit w1 0    | term s0
exit s0 0    | finish failed 1 w0
""",
    "a server is killed before the result is read": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s1 -9   | term s0
exit s0 0    | finish failed 137 s1
collected    |
""",
    "the servers end before the result is read": STARTED
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
after {COLLECT_SECONDS} | message, stop job
collected    |
exit s0 0    |
exit s1 0    | finish done 0
""",
    "the stop call fails": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
collected    | stop job
stop refused | message, term s0, term s1
exit s0 0    |
exit s1 0    | finish done 0
""",
    "a server that does not stop is terminated": STARTED
    + f"""
exit w0 0    |
exit w1 0    | collect
collected    | stop job
stop ok      |
exit s0 0    |
after {STOP_SECONDS} | term s1
exit s1 -15  | finish failed 20 s1
""",
    "the last snapshot fails": STARTED
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
signal 2     | message, term s0, term s1
collected    |
exit s0 0    |
exit s1 0    | finish interrupted 130
""",
}

DURABLE = {
    "a killed server is restarted": STARTED
    + """
exit s0 -9   | message, start s0 again
bound s0     |
exit w0 0    |
exit w1 0    | collect
""",
    "a rollback after the last worker exits fails the run": STARTED
    + """
exit w0 0    |
exit s1 -9   | message, start s1 again
exit w1 0    |
bound s1     | collect
rolled back  | stop job
stop ok      |
exit s0 0    |
exit s1 0    | finish failed 12 s1
""",
    "a server that ends before the result is read is restarted": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s1 143  | message, start s1 again
collected    |
bound s1     | collect
collected    | stop job
""",
    "a result read before a restart is ignored": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s1 143  | message, start s1 again
exit s0 143  | message, start s0 again
bound s1     |
bound s0     | collect
collected    |
rolled back  | stop job
stop ok      |
exit s0 0    |
exit s1 0    | finish failed 12 s0
""",
    "a server that does not restart before the result is read fails the run": STARTED
    + f"""
exit w0 0    |
exit w1 0    | collect
exit s1 143  | message, start s1 again
collected    |
after {BIND_SECONDS} | term s0, term s1
exit s0 0    |
exit s1 -15  | finish failed 20 s1
""",
    "a standby takes over before the result is read": STARTED
    + """
exit w0 0    |
exit w1 0    | collect
exit s1 -9 h:7 | message
collected    | stop job
""",
    "servers that exit after SIGTERM are restarted": STARTED
    + """
exit s1 143  | message, start s1 again
exit s0 143  | message, start s0 again
bound s0     |
bound s1     |
exit w0 0    |
exit w1 0    | collect
""",
    "a server replaced by its standby is not restarted": STARTED
    + """
exit s1 -9 h:7 | message
exit w0 0    |
exit w1 0    | collect
""",
    "a server whose data directory is in use is not restarted": STARTED
    + """
exit s0 10   | term w0, term w1
""",
    "a server killed during its start is restarted": """
begin        | start s0
exit s0 -9   | message, start s0 again
bound s0     | start s1, start w0, start w1
""",
}


@pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS.keys())
def test_transcript(transcript: str) -> None:
    play(transcript, durable=False)


@pytest.mark.parametrize("transcript", DURABLE.values(), ids=DURABLE.keys())
def test_transcript_with_snapshots(transcript: str) -> None:
    play(transcript, durable=True)


def test_the_outcome_names_the_first_failure_and_earlier_restarts() -> None:
    outcome = play(TRANSCRIPTS["restarts of all processes are counted together"], durable=False)

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
def test_a_run_with_running_workers_is_not_ending(last: str, ending: bool) -> None:
    machine = Supervisor(1, 2, max_restarts=0, durable=False, grace=5.0)
    machine.start(0.0)
    machine.bound("s0", 0.0)
    assert not machine.is_ending

    event(machine, last)(0.0)

    assert machine.is_ending == ending
