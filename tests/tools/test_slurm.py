"""deploy/slurm/train.sbatch trains on a real Slurm cluster of two nodes, and survives its failures.

`make test-slurm` runs it. Both nodes are on this host: 127.0.0.2 and 127.0.0.3.
"""

import os
import re
import signal
import stat
from collections.abc import Iterator

import pytest

from tests.support.prometheus_queries import DEPLOY
from tests.support.slurm import MISSING, SECONDS, Slurm, SlurmJob, slurm_in
from tests.support.workers import until

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.timeout(600),
]

SCRIPT = str(DEPLOY / "slurm" / "train.sbatch")
DIGITS = ("-m", "psworker.examples.digits", "--epochs")
FIRST_EPOCHS = r"0: epoch [2-9]:"


@pytest.fixture
def second_node(slurm: Slurm) -> Iterator[str]:
    """Name a node that the test may kill; it starts again afterwards."""
    yield "n2"
    slurm.start_node("n2")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_in(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def resumed_versions(job: SlurmJob) -> list[int]:
    return [
        int(each)
        for each in re.findall(r'"resumed_from_snapshot".*"version": (\d+)', job.servers_log)
    ]


def test_trains_to_the_end(slurm: Slurm) -> None:
    """The summary is shown. Secrets are readable by the user alone."""
    job = slurm.submit("--nodes", "2", SCRIPT, *DIGITS, "2")
    seconds = job.wait_for("epoch 0:") - job.submitted
    print(f"from submit to the end of the first epoch: {seconds:.1f} s")

    assert job.wait() == "0:0", job.everything
    assert "2 servers and 2 workers on 2 nodes" in job.output
    assert re.search(r"workers done +2\n", job.output)
    assert "127.0.0.2:" in job.output
    assert "127.0.0.3:" in job.output
    security = job.folder / "security"
    assert stat.S_IMODE(security.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in security.iterdir()} == {0o600}
    assert any((job.folder / "data").iterdir())


def test_a_heterogeneous_job_has_servers_and_workers_in_its_components(slurm: Slurm) -> None:
    job = slurm.submit(
        *("--nodes", "1", "--ntasks-per-node", "1", ":", "--ntasks", "2"), SCRIPT, *DIGITS, "2"
    )

    assert job.wait() == "0:0", job.everything
    assert "1 servers and 2 workers on 1 nodes" in job.output


def test_resumes_after_a_requeue(slurm: Slurm) -> None:
    """The servers write a last snapshot, from which the second run continues."""
    job = slurm.submit("--nodes", "2", SCRIPT, *DIGITS, "40")
    job.wait_for(FIRST_EPOCHS)
    slurm.call("scontrol", "requeue", job.number)
    job.wait_for("2 servers and 2 workers", times=2)

    assert job.wait() == "0:0", job.everything
    assert resumed_versions(job)
    assert job.output.count("epoch 0:") == 2, job.everything


def test_stops_before_the_time_limit_and_resumes(slurm: Slurm) -> None:
    job = slurm.submit(
        *("--nodes", "2", "--time", "1", "--signal", "B:USR1@10"), SCRIPT, *DIGITS, "100"
    )
    job.wait_for("the time limit is near")
    job.wait_for("2 servers and 2 workers", times=2)
    slurm.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")

    assert job.wait() == "0:0", job.everything
    assert resumed_versions(job)


def test_a_cancelled_job_is_not_queued_again(slurm: Slurm) -> None:
    job = slurm.submit("--nodes", "2", SCRIPT, *DIGITS, "1000")
    job.wait_for(FIRST_EPOCHS)
    slurm.call("scancel", job.number)
    until(lambda: "snapshot_written" in job.servers_log, "a last snapshot", SECONDS)

    job.wait()
    assert job.state == "CANCELLED"


def test_a_killed_server_starts_again_in_the_allocation(slurm: Slurm) -> None:
    job = slurm.submit("--nodes", "2", SCRIPT, *DIGITS, "20", PS_SNAPSHOT_EVERY="20steps")
    job.wait_for(FIRST_EPOCHS)
    os.kill(slurm.tasks("n2", "ps-server")[0], signal.SIGKILL)
    job.wait_for("starting again from the newest snapshot")

    assert job.wait() == "0:0", job.everything
    assert resumed_versions(job)


def test_continues_when_a_node_with_a_server_is_killed(slurm: Slurm, second_node: str) -> None:
    """All start again on the other node, from the newest snapshot."""
    job = slurm.submit("--nodes", "2", SCRIPT, *DIGITS, "40", PS_SNAPSHOT_EVERY="20steps")
    started = job.wait_for("epoch 0:") - job.submitted
    job.wait_for(FIRST_EPOCHS)
    slurm.kill_node(second_node)
    noticed = job.wait_for("starting again from the newest snapshot")
    before = job.last_epoch
    assert slurm.node_state(second_node) == "down*"
    continued = job.wait_for(rf"epoch {before + 1}:")
    print(
        f"from the noticed loss to the next epoch: {continued - noticed:.1f} s; start {started:.1f}"
    )

    assert job.wait() == "0:0", job.everything
    assert "2 servers and 1 workers on 1 nodes" in job.output


def test_workers_continue_when_a_node_without_a_server_is_killed(
    slurm: Slurm, second_node: str
) -> None:
    job = slurm.submit("--nodes", "2", SCRIPT, *DIGITS, "120", SERVERS="1")
    job.wait_for(FIRST_EPOCHS)
    slurm.kill_node(second_node)
    before = job.last_epoch
    job.wait_for(rf"epoch {before + 5}:")
    job.wait_for("Node failure on n2")

    assert job.wait() == "0:0", job.everything
    assert "starting again" not in job.output


@pytest.mark.parametrize(
    ("arguments", "variables", "remedy"),
    [
        ((), {}, "a script is missing. Try: sbatch"),
        (("train.py",), {"SERVERS": "4"}, "4 tasks are too few for SERVERS=4 and a worker. Try:"),
        (("train.py",), {"PATH": "/usr/bin:/bin"}, "ps-server is not installed here. Try:"),
    ],
)
def test_a_job_that_cannot_start_names_the_remedy(
    slurm: Slurm, arguments: tuple[str, ...], variables: dict[str, str], remedy: str
) -> None:
    job = slurm.submit("--nodes", "2", SCRIPT, *arguments, **variables)

    assert job.wait() == "2:0"
    assert f"train.sbatch: {remedy}" in job.output


def test_fewer_nodes_than_requested(slurm: Slurm) -> None:
    """A job for more nodes than there are waits; a range of nodes starts with those that are up."""
    waiting = slurm.submit("--nodes", "3", SCRIPT, *DIGITS, "2")
    until(lambda: waiting.field("Reason") == "PartitionNodeLimit", "the reason", SECONDS)
    slurm.call("scancel", waiting.number)
    slurm.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    job = slurm.submit("--nodes", "1-2", SCRIPT, *DIGITS, "2")

    assert job.wait() == "0:0", job.everything
    assert "1 servers and 1 workers on 1 nodes" in job.output
    slurm.call("scontrol", "update", "NodeName=n2", "State=RESUME")
