"""A standalone cluster of Apache Spark on 127.0.0.1, from the package pyspark."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.workers import until

WORKERS, CORES = 2, 2


@contextmanager
def spark_cluster(folder: Path) -> Iterator[str]:
    """Run the cluster; yield its address for SparkSession."""
    import pyspark

    (port,) = free_ports(1)
    home = Path(pyspark.__file__).parent
    environ = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "PYSPARK_PYTHON": sys.executable,
    }
    processes = []

    def start(name: str, *arguments: object) -> None:
        command = [str(home / "bin/spark-class"), f"org.apache.spark.deploy.{name}"]
        with (folder / f"{len(processes)}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [*command, *map(str, arguments)], env=environ, stdout=log, stderr=log
                )
            )

    own = ("--host", "127.0.0.1", "--webui-port", 0)
    address = f"spark://127.0.0.1:{port}"
    try:
        start("master.Master", *own, "--port", port)
        for number in range(WORKERS):
            size = ("--cores", CORES, "--memory", "2g", "--work-dir", folder / f"work{number}")
            start("worker.Worker", *own, *size, address)
        until(
            lambda: (folder / "0.log").read_text().count("Registering worker") == WORKERS,
            "workers of Spark",
            90,
        )
        yield address
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
