"""Training in the tasks of a barrier stage of Apache Spark (extra [spark]).

    import psworker.spark

    def train_rows(rows, epochs):
        with psworker.connect() as job:
            model = make_model()
            optimizer = job.optimizer(torch.optim.Adam(model.parameters()), model)
            for x, y in job.batches(rows, 64, epochs, sources=rows.sources):
                ...
            return model.state_dict()

    state = psworker.spark.train(df, train_rows, epochs=3, workers=2, servers=1)

Theory of operation:

- The DataFrame is written to Parquet once. A partition of an RDD cannot be read again after a task
  was killed, and then rows would be lost.
- One barrier stage has a task for each server and each worker. A server is a child process of its
  task. The tasks tell each other the servers' addresses by allGather.
- Spark kills all tasks of a barrier stage if one of them fails, and repeats the stage. It then
  begins again with new servers, so that each row counts once per epoch. With `data_dir` the servers
  continue from their log instead.
- Spark does not repeat a barrier stage that is the last stage of its job. So the result goes
  through a shuffle.
- The driver makes certificates and tokens for this training, and sends them with the tasks.
"""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pscommon.core.errors import InvalidRequestError, UnreachableError
from pscommon.core.limits import check_policy
from pscommon.security.certificates import init_tls
from pscommon.security.tokens import init_tokens
from psworker.connect import connects
from psworker.data.parquet import Parquet
from psworker.local_servers import Process, await_port
from psworker.session.arguments import check_integer
from psworker.supervision.orphan_guard import spawn

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext
    from pyspark.sql import DataFrame

MIN_SOURCES_PER_WORKER_COUNT = 4
"""Row groups per worker: a worker that is done early takes another one."""

VARIABLES = {
    "PS_TLS_CA": "ca.pem",
    "PS_TLS_CERT": "cert.pem",
    "PS_TLS_KEY": "key.pem",
    "PS_TOKEN_FILE": "tokens",
}
WORKER_VARIABLES = {
    "PS_TLS_CA": "ca.pem",
    "PS_TLS_CERT": "client-cert.pem",
    "PS_TLS_KEY": "client-key.pem",
    "PS_TOKEN_FILE": "worker.token",
}


def train(
    df: "DataFrame",
    train_fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    servers: int = 1,
    path: str | None = None,
    columns: Sequence[str] | None = None,
    use_gpu: bool = False,
    policy: str = "sync",
    staleness: int | None = None,
    data_dir: str | None = None,
    **kwargs: Any,
) -> Any:
    """Run `train_fn(rows, *args, **kwargs)` on each worker; return the result of worker 0.

    `train_fn` calls `psworker.connect()` without arguments, and goes through its rows with
    `job.batches(rows, ..., sources=rows.sources)`. The rows are in no certain order: shuffle with
    `df.orderBy(rand(seed))`.

    Args:
        df: The data. A row becomes a tuple with the values of its columns
            (`psworker.data.parquet.Parquet`).
        train_fn: As for pyspark's TorchDistributor, apart from its first argument. Spark sends it
            to the executors, which need the package paramserver.
        args: More arguments of `train_fn`, and so is `kwargs`.
        workers: Number of workers. With `servers`, it is the number of slots that the stage needs.
        servers: Number of servers.
        path: Folder for the Parquet files, which the driver and all executors can reach: a path
            of a shared file system, or a URI such as hdfs://... or s3a://... . They are removed at
            the end. None: a temporary folder, if Spark runs on this machine only.
        columns: Columns of the rows, in this order. None: all.
        use_gpu: Train on the GPU that Spark gives to the task
            (`spark.task.resource.gpu.amount`). Otherwise on the CPU.
        policy: sync, async or ssp.
        staleness: Of policy ssp.
        data_dir: Folder of a shared file system for the log and snapshots of the servers: a
            repeated stage continues from there.

    Raises:
        InvalidRequestError: An argument does not fit, Spark has too few slots, or the executors
            lack the package.
        py4j.protocol.Py4JJavaError: The stage has failed; the message has the error of its task.
    """
    workers, servers = check_integer("workers", workers, 1), check_integer("servers", servers, 1)
    check_policy(policy, staleness)
    session = df.sparkSession
    context = session.sparkContext
    flags = ["--policy", policy, "--min-workers", str(workers), "--exit-when-done"]
    if staleness is not None:
        flags += ["--staleness", str(staleness)]
    if data_dir is not None:
        flags += ["--data-dir", data_dir, "--durability", "log"]
    with _parquet_of(df, path, workers) as uri:
        stage = _Stage(
            servers, workers, uri, columns, flags, _secrets(), use_gpu, train_fn, args, kwargs
        )
        count = servers + workers
        try:
            tasks = context.parallelize(range(count), count).barrier().mapPartitions(stage)
            rows = tasks.coalesce(1, shuffle=True).collect()
        except Exception as error:
            _explain(str(error), count)
            raise
    return rows[0]


@contextmanager
def _parquet_of(df: "DataFrame", path: str | None, workers: int) -> Iterator[str]:
    """Write the rows, in at least MIN_SOURCES_PER_WORKER_COUNT files per worker."""
    is_local = df.sparkSession.sparkContext.master.startswith("local")
    if path is None and not is_local:
        raise InvalidRequestError(
            "the executors are other machines than this one. Try: path=, a folder that all of them "
            "can reach, such as hdfs://... or a mounted file system"
        )
    with tempfile.TemporaryDirectory(prefix="paramserver-") as own:
        base = path or own
        if "://" not in base and not base.startswith("file:"):
            base = Path(base).absolute().as_uri()  # Spark takes a bare path for its default system
        uri = f"{base}/rows-{uuid.uuid4().hex}"
        count = max(df.rdd.getNumPartitions(), MIN_SOURCES_PER_WORKER_COUNT * workers)
        try:
            df.repartition(count).write.parquet(uri)
            Parquet(uri)  # there are rows
            yield uri
        finally:
            _remove(df, uri)


def _remove(df: "DataFrame", uri: str) -> None:
    jvm: Any = df.sparkSession.sparkContext._jvm
    configuration: Any = df.sparkSession.sparkContext._jsc.hadoopConfiguration()
    folder = jvm.org.apache.hadoop.fs.Path(uri)
    folder.getFileSystem(configuration).delete(folder, True)


def _secrets() -> dict[str, bytes]:
    """Return the files with which the processes of one training know each other."""
    with tempfile.TemporaryDirectory(prefix="paramserver-") as folder:
        init_tls(Path(folder))
        init_tokens(Path(folder))
        names = {*VARIABLES.values(), *WORKER_VARIABLES.values()}
        return {name: (Path(folder) / name).read_bytes() for name in names}


def _explain(text: str, slots: int) -> None:
    """Raise an error with a remedy for what users can change."""
    if "No module named 'psworker'" in text or "No module named 'pscommon'" in text:
        raise InvalidRequestError(
            "the executors have no package paramserver. Try: `pip install 'paramserver[spark]'` "
            "in the Python of PYSPARK_PYTHON on each of them"
        )
    if "SPARK-24819" in text or "requires more slots" in text:
        raise InvalidRequestError(
            f"Spark has fewer than the {slots} slots that servers and workers need at the same "
            "time. Try: more executors or cores, or fewer workers="
        )


@dataclass(frozen=True)
class _Stage:
    """What each task of the barrier stage runs: the first ones are servers, the others workers."""

    servers: int
    workers: int
    uri: str
    columns: Sequence[str] | None
    flags: Sequence[str]
    secrets: Mapping[str, bytes]
    use_gpu: bool
    train_fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, _: Iterator[int]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        number = context.partitionId()
        with tempfile.TemporaryDirectory(prefix="paramserver-") as folder:
            for name, content in self.secrets.items():
                (Path(folder) / name).write_bytes(content)
                (Path(folder) / name).chmod(0o600)
            if number < self.servers:
                self._serve(context, number, Path(folder))
                return iter(())
            addresses = [text for text in _gather_twice(context) if text]
            result = self._train(context, addresses, number - self.servers, Path(folder))
        return iter([result] if number == self.servers else ())

    def _serve(self, context: "BarrierTaskContext", shard: int, folder: Path) -> None:
        """Run a server until the training is over."""
        host = context.getTaskInfos()[shard].address.rpartition(":")[0] or "127.0.0.1"
        process, own = self._start(shard, host, "", folder) if shard == 0 else (None, "")
        first = context.allGather(own)[0]
        if process is None:
            process, own = self._start(shard, host, first, folder)
        context.allGather(own)
        code = process.wait()
        if code:
            raise UnreachableError(f"the server of shard {shard} ended with exit code {code}")

    def _start(self, shard: int, host: str, join: str, folder: Path) -> "tuple[Process, str]":
        """Start the server as a child process, which ends with this task; return its address."""
        port_file = folder / "port"
        command = [sys.executable, "-P", "-m", "psserver", "--shard", f"{shard}/{self.servers}"]
        command += [*self.flags, "--bind", f"{host}:0", "--port-file", str(port_file)]
        command += ["--join", join] if join else []
        environ = os.environ | {name: str(folder / file) for name, file in VARIABLES.items()}
        process = spawn(command, environ, stdin=subprocess.DEVNULL)
        port = await_port(process, port_file)
        if port is None:
            raise UnreachableError(
                f"the server of shard {shard} did not start; the log of the executor says why"
            )
        return process, f"{host}:{port}"

    def _train(
        self, context: "BarrierTaskContext", addresses: Sequence[str], rank: int, folder: Path
    ) -> Any:
        variables = {name: str(folder / file) for name, file in WORKER_VARIABLES.items()}
        variables |= {
            "PS_SERVERS": ",".join(addresses),
            "PS_WORKER_RANK": str(rank),
            "PS_WORKER_COUNT": str(self.workers),
            "PS_DEVICE": self._device(context),
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        connects.begin_script()
        try:
            rows = Parquet(self.uri, self.columns)
            return self.train_fn(rows, *self.args, **self.kwargs)
        finally:
            for name, value in before.items():  # Spark may use this process for other tasks
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _device(self, context: "BarrierTaskContext") -> str:
        if not self.use_gpu:
            return "cpu"
        gpu = context.resources().get("gpu")
        if gpu is None:
            raise InvalidRequestError(
                "use_gpu=True, and Spark gives this task no GPU. Try: the setting "
                "spark.task.resource.gpu.amount"
            )
        return f"cuda:{gpu.addresses[0]}"


def _gather_twice(context: "BarrierTaskContext") -> list[str]:
    """Take part in the two exchanges of addresses; return those of all servers."""
    context.allGather("")
    return list(context.allGather(""))
