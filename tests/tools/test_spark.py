"""psworker.spark on a standalone cluster of Spark: `make test-spark`, with its own environment."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from psworker import InvalidRequestError
from tests.support.spark_cluster import spark_cluster

pytest.importorskip("pyspark", reason="pyspark is not installed: make test-spark")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: make test-spark")
if shutil.which("java") is None:
    pytest.skip("Java is not installed", allow_module_level=True)

import pyspark.cloudpickle
from pyspark.sql import DataFrame, SparkSession

import psworker.spark

pytestmark = pytest.mark.timeout(900)

ROWS, EPOCHS, BATCH = 400, 3, 4

# executors do not find the tests: their functions travel with the tasks
pyspark.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make_session(master: str) -> SparkSession:
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.stage.maxConsecutiveAttempts": "3",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    }
    builder = SparkSession.builder.master(master).appName("paramserver")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with spark_cluster(tmp_path_factory.mktemp("spark")) as address:
        session = make_session(address)
        yield session
        session.stop()


@pytest.fixture
def df(session: SparkSession) -> DataFrame:
    return session.range(ROWS).selectExpr(
        "id", "array(id / 2.0, 1.0) as features", "id % 2 as label"
    )


def count_rows(rows: Any, epochs: int, death: str = "") -> dict[str, Any]:
    """Add 1 to the weight of each row that is trained on.

    death: a worker with rank 1 that does not find this file makes it, and dies in its third step.
    """
    with psworker.connect() as job:
        model = torch.nn.Linear(ROWS, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        steps, first = 0, 0.0
        for ids, features, _ in job.batches(rows, BATCH, epochs, sources=rows.sources):
            assert features.shape[1] == 2
            assert (features[:, 0] == ids / 2).all()
            (-model.weight[0, ids].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps, first = steps + 1, first or time.time()
            if death and job.rank == 1 and steps == 3 and not Path(death).exists():
                Path(death).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return {"weights": model.weight.detach()[0], "steps": steps, "first": first}


def test_each_row_counts_once_per_epoch(df: DataFrame, tmp_path: Path) -> None:
    began = time.time()
    found = psworker.spark.train(
        df, count_rows, EPOCHS, workers=2, servers=2, policy="async", path=str(tmp_path)
    )
    print(f"\n{found['first'] - began:.1f} s from the call to the first step")

    assert found["weights"].tolist() == [EPOCHS] * ROWS
    assert 0 < found["steps"] < EPOCHS * ROWS / BATCH
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("continues", [False, True])
def test_each_row_counts_once_after_a_stage_was_repeated(
    df: DataFrame, tmp_path: Path, continues: bool
) -> None:
    data_dir = str(tmp_path / "servers") if continues else None
    death = tmp_path / "death"

    found = psworker.spark.train(
        df,
        count_rows,
        EPOCHS,
        str(death),
        workers=2,
        servers=1,
        policy="async",
        path=str(tmp_path / "rows"),
        data_dir=data_dir,
    )

    assert death.exists()
    assert found["weights"].tolist() == [EPOCHS] * ROWS


def test_an_error_of_the_function_reaches_the_driver(df: DataFrame, tmp_path: Path) -> None:
    def fail(rows: Any) -> None:
        raise ValueError(f"no model for {rows.columns}")

    with pytest.raises(Exception, match="no model for"):
        psworker.spark.train(df, fail, path=str(tmp_path))


def test_too_few_slots(df: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="fewer than the 9 slots"):
        psworker.spark.train(df, count_rows, 1, workers=8, path=str(tmp_path))


def test_a_path_is_needed_on_a_cluster(df: DataFrame) -> None:
    with pytest.raises(InvalidRequestError, match="path="):
        psworker.spark.train(df, count_rows, 1)


def test_executors_without_the_package(tmp_path: Path) -> None:
    """Run last of all, in another process: a process has one Spark context."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    script = f"""
import os
os.environ["PYSPARK_PYTHON"] = {str(tmp_path / "bare/bin/python")!r}
import psworker.spark
from tests.tools.test_spark import count_rows, make_session
df = make_session("local[3]").range(8)
try:
    psworker.spark.train(df, count_rows, 1)
except psworker.InvalidRequestError as error:
    print("refused:", error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "refused: the executors have no package paramserver" in found.stdout, found.stderr
