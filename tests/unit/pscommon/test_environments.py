"""Detection of an engine's environment, with the variables that its documentation gives."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pscommon.environments.detection import FLAGS, detect, find
from pscommon.environments.place import Role, Surroundings, expand_hosts
from tests.support.environments import SERVERS, WORKERS, config, detected, found, reason


@pytest.mark.parametrize("role", ["server", "worker"])
def test_no_environment_gives_no_place(role: Role) -> None:
    assert detected(role, "server-1", PATH="/bin", HOSTNAME="server-1", PS_SERVERS="a:1") is None


PODS = "ps-[0-1].ps:50051"
PODS_ADDRESSES = ("ps-0.ps:50051", "ps-1.ps:50051")


def test_a_pod_of_a_stateful_set_is_the_server_with_its_name() -> None:
    """https://kubernetes.io/docs/concepts/workloads/controllers/statefulset: NAME-ORDINAL."""
    place = found("server", "ps-1", PS_ALL_SERVERS=PODS)

    assert (place.index, place.servers, place.address) == (1, 2, "ps-1.ps:50051")
    assert place.addresses == PODS_ADDRESSES
    assert found("server", "ps-1.ps.default.svc.cluster.local", PS_ALL_SERVERS=PODS).index == 1


def test_the_name_of_the_pod_goes_before_the_host_name() -> None:
    """With hostNetwork the host name is that of the node."""
    place = found("server", "ps-0", PS_ALL_SERVERS=PODS, POD_NAME="ps-1")

    assert (place.index, place.variables) == (1, ("PS_ALL_SERVERS", "POD_NAME"))


def test_a_host_that_is_not_listed_learns_the_addresses_only() -> None:
    for role, host in (("server", "ps-2"), ("server", "trainer"), ("worker", "ps-0")):
        place = found(role, host, PS_ALL_SERVERS=PODS)  # type: ignore[arg-type]
        assert (place.index, place.address, place.addresses) == (None, None, PODS_ADDRESSES)


def test_a_host_with_two_servers_is_none_of_them() -> None:
    assert found("server", "a", PS_ALL_SERVERS="a:1,a:2").index is None


def test_an_ip_address_is_compared_in_full() -> None:
    place = found("server", PS_ALL_SERVERS="10.0.0.1:1,10.0.0.2:1,[::1]:1", POD_NAME="10.0.0.2")

    assert place.index == 1
    assert found("server", "10", PS_ALL_SERVERS="10.0.0.1:1,11.0.0.1:1").index is None


@pytest.mark.parametrize(
    "text", ["ps-[0-1", "ps-[1-0]:1", "ps", ",", "a:1,a:1", "a:1,,b:1", "a:0", "[0-99999999]:1"]
)
def test_a_malformed_list_of_servers_is_refused(text: str) -> None:
    assert "PS_ALL_SERVERS" in reason("worker", PS_ALL_SERVERS=text)


def test_an_indexed_job_gives_the_rank() -> None:
    """https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static."""
    place = found("worker", JOB_COMPLETION_INDEX="2", PS_ALL_SERVERS=PODS)

    assert (place.index, place.workers, place.addresses) == (2, None, PODS_ADDRESSES)
    assert place.environment == "PS_ALL_SERVERS, indexed Job"


def test_an_indexed_job_says_nothing_of_a_server() -> None:
    """A JobSet has one Job for each replicated job: all of them may have the index 0."""
    assert detected("server", JOB_COMPLETION_INDEX="2") is None
    assert found("server", "x-ps-1-0", JOB_COMPLETION_INDEX="0", PS_ALL_SERVERS="x-ps-[0-1]-0:1")


def test_kubeflow_trainer_gives_rank_and_number_of_nodes() -> None:
    """The torch plugin of github.com/kubeflow/trainer: PET_NODE_RANK is the completion index."""
    environ = {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": "3",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
        "JOB_COMPLETION_INDEX": "3",
    }

    place = found("worker", **environ)

    assert (place.index, place.workers) == (3, 4)
    assert place.environment == "Kubeflow Trainer, indexed Job"
    assert found("worker", **{**environ, "PET_NNODES": "1:4"}).workers is None


STEP = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02,7]",
    "SLURM_JOB_NODELIST": "login1,node[01-02,7]",
    "SLURMD_NODENAME": "node7",
}
"""As srun 22.05 sets them; https://slurm.schedmd.com/srun.html, output environment variables."""


def test_a_task_of_a_slurm_step_is_what_the_command_says() -> None:
    server, worker = found("server", **STEP), found("worker", **STEP)

    assert (server.index, server.servers, server.workers) == (3, 4, None)
    assert (server.addresses, server.address) == (("node01:50051",), "node7:50054")
    assert (worker.index, worker.servers, worker.workers) == (3, None, 4)
    assert worker.addresses == ()


def test_a_batch_script_is_no_task() -> None:
    """Slurm sets SLURM_PROCID=0 there too, but no variable of a step."""
    environ = {name: text for name, text in STEP.items() if "STEP" not in name}

    assert detected("worker", **environ) is None


def test_workers_of_slurm_learn_the_servers_of_the_script() -> None:
    place = found("worker", **STEP, PS_ALL_SERVERS="node[01-02]:50051")

    assert (place.index, place.addresses) == (3, ("node01:50051", "node02:50051"))


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
}
"""https://docs.pytorch.org/docs/stable/elastic/run.html, environment variables."""


def test_a_process_of_torchrun_is_a_worker() -> None:
    place = found("worker", **TORCHRUN)

    assert (place.index, place.workers, place.addresses) == (1, 2, ())
    assert detected("server", **TORCHRUN) is None


def test_torchrun_starts_processes_inside_another_environment() -> None:
    place = found("worker", **{**STEP, "SLURM_PROCID": "0"}, **TORCHRUN, PS_ALL_SERVERS=PODS)

    assert (place.index, place.workers, place.addresses) == (1, 2, PODS_ADDRESSES)


def test_a_group_of_torchrun_is_one_worker_of_the_environment_around() -> None:
    assert detected("worker", **TORCHRUN, PS_GROUP="1") is None
    assert found("worker", **STEP, **TORCHRUN, PS_GROUP="1").index == 3


def test_variables_of_an_operator_are_not_those_of_torchrun() -> None:
    environ = {name: text for name, text in TORCHRUN.items() if "LOCAL" not in name}

    assert detected("worker", **environ) is None


@pytest.mark.parametrize(
    ("name", "text", "environ"),
    [
        ("JOB_COMPLETION_INDEX", "two", {}),
        ("JOB_COMPLETION_INDEX", "-1", {}),
        ("JOB_COMPLETION_INDEX", "9" * 5000, {}),
        ("SLURM_PROCID", "x", STEP),
        ("SLURM_PROCID", "4", STEP),
        ("RANK", "2", TORCHRUN),
        ("WORLD_SIZE", "0", TORCHRUN),
        ("PET_NODE_RANK", "1", {"PET_NNODES": "1"}),
        ("PET_NNODES", "0", {"PET_NODE_RANK": "0"}),
        ("PET_NNODES", "many", {"PET_NODE_RANK": "0"}),
    ],
)
def test_a_malformed_number_is_refused(name: str, text: str, environ: dict[str, str]) -> None:
    shown = "RANK" if name == "WORLD_SIZE" else name
    assert shown in reason("worker", **{**environ, name: text})


def test_a_malformed_nodelist_is_refused() -> None:
    assert "SLURM_STEP_NODELIST" in reason("server", **{**STEP, "SLURM_STEP_NODELIST": "n[3-1]"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7],login1", ["node01", "node02", "node03", "node7", "login1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[0,5]-ib", ["r1n0-ib", "r1n5-ib", "r2n0-ib", "r2n5-ib"]),
        (" a , b ", ["a", "b"]),
        ("[::1]:50051,[::2]:50051", ["[::1]:50051", "[::2]:50051"]),
    ],
)
def test_the_expression_of_slurm_for_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts("X", text) == tuple(hosts)


CONTRADICTION = {
    "TF_CONFIG": config("worker", 1, ps=SERVERS, worker=WORKERS),
    "JOB_COMPLETION_INDEX": "2",
}


def test_environments_that_contradict_each_other_are_refused() -> None:
    text = reason("worker", **CONTRADICTION)

    for part in ("TF_CONFIG", "says 1", "JOB_COMPLETION_INDEX", "says 2", "--worker-rank"):
        assert part in text
    slurm = {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "1"}
    assert "number of workers" in reason("worker", **slurm, TF_CONFIG=CONTRADICTION["TF_CONFIG"])
    assert "--shard" in reason(
        "server", **STEP, TF_CONFIG=config("ps", 1, ps=SERVERS, worker=WORKERS)
    )
    assert "--ps" in reason(
        "worker", TF_CONFIG=CONTRADICTION["TF_CONFIG"], PS_ALL_SERVERS="other:2222"
    )


def test_a_fact_that_a_flag_gives_may_be_contradicted() -> None:
    place = detect(Surroundings(CONTRADICTION), "worker", {"addresses", "workers"})

    assert place is not None
    assert place.addresses == tuple(SERVERS)


def test_an_environment_of_another_role_is_refused() -> None:
    server = config("ps", 0, ps=SERVERS, worker=WORKERS)

    assert "ps-server" in reason("worker", TF_CONFIG=server)
    assert "ps-worker" in reason("server", TF_CONFIG=CONTRADICTION["TF_CONFIG"])
    assert detect(Surroundings({"TF_CONFIG": server}), "worker", {"index"}) is None


class TaskContext:
    """The part of pyspark's class that detection calls."""

    current: "TaskContext | None" = None

    @classmethod
    def get(cls) -> "TaskContext | None":
        return TaskContext.current

    def partitionId(self) -> int:
        return 1


class BarrierTaskContext(TaskContext):
    def getTaskInfos(self) -> list[str]:
        return ["10.0.0.1:5000", "10.0.0.2:5000", "10.0.0.2:5001"]


@pytest.mark.parametrize(
    ("context", "index", "workers"),
    [(None, 3, 4), (TaskContext(), None, None), (BarrierTaskContext(), 1, 3)],
)
def test_a_barrier_task_of_spark_is_a_worker(
    context: TaskContext | None,
    index: int | None,
    workers: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pyspark.BarrierTaskContext; the executor runs in a task of Slurm here."""
    monkeypatch.setattr(TaskContext, "current", context)
    package = SimpleNamespace(TaskContext=TaskContext, BarrierTaskContext=BarrierTaskContext)

    place = detect(Surroundings(STEP, "", {"pyspark": package}), "worker", FLAGS["worker"])

    assert place is not None
    assert (place.index, place.workers) == (index, workers)


@pytest.mark.parametrize(("mode", "index"), [(None, 3), (0, 3), (1, None)])
def test_an_actor_of_ray_has_no_rank(mode: int | None, index: int | None) -> None:
    """The variables of Slurm in an actor are those of the raylet."""
    package = SimpleNamespace(
        is_initialized=lambda: mode is not None,
        get_runtime_context=lambda: SimpleNamespace(worker=SimpleNamespace(mode=mode)),
        WORKER_MODE=1,
    )

    place = detect(Surroundings(STEP, "", {"ray": package}), "worker", FLAGS["worker"])

    assert place is not None
    assert place.index == index


def test_a_place_is_described_in_words() -> None:
    worker = find(Surroundings(CONTRADICTION), "worker")[0]

    assert str(worker) == f"worker 1 of 2; servers {', '.join(SERVERS)}"
    assert str(replace(worker, role="server", servers=2, addresses=())) == "shard 1 of 2"
    assert str(replace(worker, index=None, addresses=())) == (
        "nothing about the place of this process"
    )
