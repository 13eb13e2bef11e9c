"""Detection in TFJob and Vertex AI, with the variables that their documentation gives."""

import pytest

from pscommon.environments.detection import detect
from pscommon.environments.place import Surroundings
from tests.support.environments import CHIEF, SERVERS, WORKERS, config, detected, found, reason


@pytest.mark.parametrize(
    ("kind", "index", "rank"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_tf_config_numbers_the_chief_before_the_workers(kind: str, index: int, rank: int) -> None:
    """TFJob: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow."""
    text = config(kind, index, ps=SERVERS, chief=CHIEF, worker=WORKERS)

    place = found("worker", TF_CONFIG=text)

    assert (place.index, place.workers, place.servers) == (rank, 3, 2)
    assert place.addresses == tuple(SERVERS)
    assert place.variables == ("TF_CONFIG",)


def test_tf_config_without_a_chief_starts_with_worker_0() -> None:
    place = found("worker", TF_CONFIG=config("worker", "1", ps=SERVERS, worker=WORKERS))

    assert (place.index, place.workers) == (1, 2)


def test_tf_config_of_a_server_has_its_own_address() -> None:
    text = config("ps", 1, ps=SERVERS, master=CHIEF, worker=WORKERS)

    place = found("server", TF_CONFIG=text)

    assert (place.index, place.servers, place.workers) == (1, 2, 3)
    assert place.address == SERVERS[1]


def test_tf_config_without_ps_entries_has_no_server() -> None:
    text = config("worker", 0, worker=WORKERS)

    assert "needs `ps` entries" in reason("worker", TF_CONFIG=text)
    place = detect(Surroundings({"TF_CONFIG": text}), "worker", {"index"})
    assert place is not None
    assert (place.index, place.servers, place.addresses) == (0, 0, ())


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '"text"',
        "{}",
        '{"cluster": {}}',
        '{"cluster": [], "task": {}}',
        "[" * 100_000,
        config("worker", 2, ps=SERVERS, worker=WORKERS),
        config("worker", -1, ps=SERVERS, worker=WORKERS),
        config("worker", 0.5, ps=SERVERS, worker=WORKERS),
        config("worker", True, ps=SERVERS, worker=WORKERS),
        config("worker", "9" * 5000, ps=SERVERS, worker=WORKERS),
        config("worker", 0, ps="job-ps-0:2222", worker=WORKERS),
        config("worker", 0, ps=SERVERS, worker={"0": WORKERS[0]}),
        config("worker", 0, ps=[7], worker=WORKERS),
        config("worker", 0, ps=["job-ps-0"], worker=WORKERS),
        config("worker", 0, ps=["job-ps-0:0"], worker=WORKERS),
        config("worker", 0, ps=SERVERS[:1] * 2, worker=WORKERS),
        config("evaluator", 0, ps=SERVERS, worker=WORKERS),
        config(["ps"], 0, ps=SERVERS, worker=WORKERS),
    ],
)
def test_a_malformed_tf_config_is_refused(text: str) -> None:
    assert "TF_CONFIG" in reason("worker", TF_CONFIG=text)


POOLS = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-ab-0:2222"],
    "workerpool2": ["cmle-training-workerpool2-ab-0:2222", "cmle-training-workerpool2-ab-1:2222"],
    "workerpool3": ["cmle-training-workerpool3-ab-0:2222"],
}


def test_cluster_spec_of_vertex_ai_names_the_pools() -> None:
    """https://cloud.google.com/vertex-ai/docs/training/distributed-training."""
    worker = found("worker", CLUSTER_SPEC=config("workerpool1", 0, **POOLS))
    server = found("server", CLUSTER_SPEC=config("workerpool2", 1, **POOLS))

    assert (worker.index, worker.workers) == (1, 2)
    assert (server.index, server.servers, server.workers) == (1, 2, 2)
    assert server.address == POOLS["workerpool2"][1]
    assert "evaluator" not in str(found("worker", CLUSTER_SPEC=config("workerpool0", 0, **POOLS)))


def test_cluster_spec_of_another_engine_is_not_read() -> None:
    assert detected("worker", CLUSTER_SPEC="ps:2,worker:3") is None


def test_cluster_spec_agrees_with_tf_config() -> None:
    """Vertex AI sets both."""
    named = {"chief": POOLS["workerpool0"], "worker": POOLS["workerpool1"]}
    text = config("chief", 0, **named, ps=POOLS["workerpool2"])

    place = found("worker", TF_CONFIG=text, CLUSTER_SPEC=config("workerpool0", 0, **POOLS))

    assert place.environment == "TF_CONFIG, CLUSTER_SPEC"
    assert place.index == 0


def test_a_malformed_cluster_spec_is_refused() -> None:
    assert "CLUSTER_SPEC" in reason("worker", CLUSTER_SPEC='{"cluster": {"workerpool0": ')
    assert "CLUSTER_SPEC" in reason("worker", CLUSTER_SPEC=config("workerpool3", 0, **POOLS))
