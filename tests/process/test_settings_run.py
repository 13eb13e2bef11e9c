"""Each setting of ps-run changes what a run does. Two runs see nearly all of them: one has every
setting, one none.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psworker
from pscommon.snapshot import SnapshotDirectory
from psworker import Client
from tests.support.cluster import Cluster
from tests.support.malloc_probe import MAPPED
from tests.support.ports import free_ports
from tests.support.programs import Program, Programs, programs_in
from tests.support.settings_coverage import run_setting

# Tells what it sees of the job, then trains a little.
SCRIPT = (
    MAPPED
    + """
import json, os, sys, urllib.request
import numpy as np, torch, psworker
from contextlib import closing
from pscommon.wire.channel import open_channel
from psproto.v1 import coordinator_pb2 as co
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub

TOLD = ("PS_DEVICE", "PS_CONNECT_TIMEOUT", "PS_LANES", "PS_OVERLAP")

def second():
    "Is there room in flight for another worker?"
    try:
        with psworker.Client() as client:
            client.register({"w": np.zeros(100)}, psworker.OptimizerSpec("sgd", lr=1.0))
    except psworker.PSError as error:
        return "--in-flight" not in str(error)
    return True

with psworker.Client() as client:
    client.register({"w": np.zeros(100)}, psworker.OptimizerSpec("sgd", lr=1.0))
    with closing(open_channel(client.addresses[0])) as channel:
        joined = CoordinatorServiceStub(channel).Join(co.JoinRequest(), timeout=20)
    alive = [
        urllib.request.urlopen(f"http://{address}/livez", timeout=20).status
        for address in sys.argv[1:]
    ]
    environment = {name: os.environ.get(name) for name in TOLD}
    environment |= {"mapped": mapped(), "second": second()}
    facts = {"threads": torch.get_num_threads(), "lease": joined.lease_ms, "alive": alive}
    print(json.dumps({**client.status(), **facts, **environment}))
    for _ in range(4):
        client.push({"w": np.ones(100)})
"""
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs_in(tmp_path_factory.mktemp("run")) as programs:
        programs.script(SCRIPT)
        yield programs


@pytest.fixture(scope="module")
def chosen(programs: Programs) -> Program:
    """A run with every setting but --max-restarts and --grace, over the snapshot of an earlier
    job.
    """
    earlier(programs.folder / "job")
    metrics = [f"127.0.0.1:{port}" for port in free_ports(3)]
    line = (
        "--servers 2 --workers 1 --summary s.json --history h.csv --save m.safetensors --log-dir "
        "logs --policy ssp --staleness 3 --max-staleness 9 --min-workers 1 --lease 77s --job "
        "otter --data-dir job --snapshot-every 1steps --snapshot-keep 2 --resume never "
        f"--connect-timeout 33s --device cpu --threads 2 --metrics-bind {metrics[0]} --log-level "
        "warning --log-format json --lanes grpc --overlap on --malloc system --in-flight 448"
    )
    return done(programs.run("ps-run", *line.split(), "train.py", *metrics))


@pytest.fixture(scope="module")
def careful(programs: Programs) -> Program:
    """A run with every setting about what may go wrong."""
    line = (
        "--workers 2 --min-workers 1 --progress-timeout 66s --on-worker-loss wait:44s "
        "--backup-workers 1 --late-gradients drop --bad-gradients skip --max-norm 1e9 "
        "--quarantine-after 5 --data-dir careful --durability log --log-fsync no"
    )
    return done(programs.run("ps-run", *line.split(), "train.py"))


@pytest.fixture(scope="module")
def default(programs: Programs) -> Program:
    """A run with no setting but the number of workers."""
    return done(programs.run("ps-run", "--workers", 2, "train.py"))


def done(run: Program) -> Program:
    assert run.wait() == 0, run.said
    return run


def earlier(data_dir: Path) -> None:
    """Leaves a snapshot of version 1."""
    cluster = Cluster(1, data_dir=data_dir)
    with Client(cluster.address) as client:
        client.register({"w": np.zeros(100)}, psworker.OptimizerSpec("sgd", lr=1.0))
        client.push({"w": np.ones(100)})
    cluster.stop()


def told(run: Program) -> dict[str, Any]:
    """What the first worker has told."""
    line = next(line for line in run.out.splitlines() if "] {" in line)
    document: dict[str, Any] = json.loads(line.partition("] ")[2])
    return document


@run_setting("servers", "workers")
def test_how_many(chosen: Program, default: Program) -> None:
    for run, servers, workers in ((chosen, 2, 1), (default, 1, 2)):
        assert len(told(run)["servers"]) == servers
        assert (
            len({line.split()[0] for line in run.out.splitlines() if line.startswith("[w")})
            == workers
        )


# what a worker is told of a run with the setting, and of one without
TOLD: dict[str, tuple[str, Any, Any]] = {
    "policy": ("policy", "ssp", "sync"),
    "staleness": ("staleness", 3, None),
    "max_staleness": ("max_staleness", 9, None),
    "min_workers": ("min_workers", 1, 2),
    "lease": ("lease", 77_000, 5_000),
    "connect_timeout": ("PS_CONNECT_TIMEOUT", "33.0", "60.0"),
    "device": ("PS_DEVICE", "cpu", None),
    "threads": ("threads", 2, 1),
    "lanes": ("PS_LANES", "grpc", "auto"),
    "overlap": ("PS_OVERLAP", "on", "off"),
    "malloc": ("mapped", True, False),
    "in_flight": ("second", False, True),  # a push has 832 bytes, at most 448 on one of two servers
    "metrics_bind": ("alive", [200, 200, 200], []),
}


@run_setting(*TOLD)
@pytest.mark.parametrize(("name", "with_it", "without"), TOLD.values(), ids=TOLD.keys())
def test_what_a_worker_is_told(
    chosen: Program, default: Program, name: str, with_it: object, without: object
) -> None:
    assert told(chosen)[name] == with_it
    if name != "PS_DEVICE":  # what auto becomes is the machine's business
        assert told(default)[name] == without


# the same for the settings about what may go wrong
CAREFUL: dict[str, tuple[Any, Any]] = {
    "on_worker_loss": ("wait:44", "shrink"),
    "progress_timeout": (66.0, None),
    "backup_workers": (1, 0),
    "late_gradients": ("drop", "return"),
    "bad_gradients": ("skip", "abort"),
    "max_norm": (1e9, None),
    "quarantine_after": (5, None),
    "durability": ("log", "snapshot"),
    "log_fsync": ("no", "everysec"),
}


@run_setting(*CAREFUL)
def test_what_a_worker_is_told_of_faults(careful: Program, default: Program) -> None:
    assert {name: told(careful)[name] for name in CAREFUL} == {
        name: row[0] for name, row in CAREFUL.items()
    }
    assert {name: told(default)[name] for name in CAREFUL} == {
        name: row[1] for name, row in CAREFUL.items()
    }


@run_setting("allow_idle")
def test_allow_idle(programs: Programs) -> None:
    programs.script("print('nothing to train')", "idle.py")
    without, with_it = (
        programs.run("ps-run", "--log-dir", "idle", *flags, "idle.py")
        for flags in ((), ("--allow-idle",))
    )

    assert (without.wait(), with_it.wait()) == (16, 0)


@run_setting("global_batch")
def test_global_batch(programs: Programs, default: Program) -> None:
    """Not with --backup-workers, so in a run of its own."""
    assert (
        told(done(programs.run("ps-run", "--global-batch", 64, "train.py")))["global_batch"] == 64
    )
    assert told(default)["global_batch"] is None


@run_setting("job")
def test_job(chosen: Program, default: Program) -> None:
    assert told(chosen)["job"] == "otter"
    assert told(default)["job"].startswith("job-")


@run_setting("data_dir", "snapshot_every", "snapshot_keep", "resume")
def test_snapshots(programs: Programs, chosen: Program) -> None:
    """Two of the four that came with the steps are kept; the earlier job's is set aside, not
    resumed.
    """
    found = SnapshotDirectory(programs.folder / "job")

    assert len(found.versions()) == 2
    assert found.versions()[-1] == 4
    assert (found.folder / "000000000001.aside-1").exists()


@run_setting("summary")
def test_summary(programs: Programs, chosen: Program, default: Program) -> None:
    assert [path.name for path in programs.folder.glob("*.json")] == ["s.json"]
    assert json.loads((programs.folder / "s.json").read_text())["policy"] == "ssp"


@run_setting("history")
def test_history(programs: Programs, chosen: Program, default: Program) -> None:
    assert [path.name for path in programs.folder.glob("*.csv")] == ["h.csv"]
    assert (
        (programs.folder / "h.csv")
        .read_text()
        .startswith("time,seconds,version,worker,rank,name,value\n")
    )


@run_setting("save")
def test_save(programs: Programs, chosen: Program, default: Program) -> None:
    assert [path.name for path in programs.folder.glob("*.safetensors")] == ["m.safetensors"]


@run_setting("log_dir")
def test_log_dir(programs: Programs, chosen: Program, default: Program) -> None:
    assert sorted(path.name for path in (programs.folder / "logs").iterdir()) == [
        "s0.log",
        "s1.log",
        "w0.log",
    ]
    assert list(programs.temporary.iterdir()) == []


@run_setting("log_format")
def test_log_format(chosen: Program, default: Program) -> None:
    (line,) = [line for line in chosen.err.splitlines() if "snapshot_set_aside" in line]
    assert json.loads(line.partition("] ")[2])["level"] == "warning"
    assert "[info] listening" in default.err.replace("  ", " ")


@run_setting("log_level")
def test_log_level(chosen: Program, default: Program) -> None:
    assert ["listening" in run.err for run in (chosen, default)] == [False, True]


@pytest.mark.timing
@run_setting("max_restarts", "grace")
def test_max_restarts_and_grace(programs: Programs) -> None:
    """The first worker dies and is not started again; the second one does not want to end and is
    made to.
    """
    script = """
import os, signal
if os.environ["PS_WORKER_RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("stubborn", "w").close()
    while True:
        signal.pause()
open("stubborn").close()
print("falls")
os.kill(os.getpid(), signal.SIGKILL)
"""
    programs.script(script, "falls.py")
    os.mkfifo(programs.folder / "stubborn")  # each end waits for the other one
    flags = ("--workers", 2, "--max-restarts", 0, "--grace", "500ms")
    run = programs.start("ps-run", *flags, "falls.py")
    run.wait_for("falls")
    began = time.monotonic()

    assert run.wait() == 137
    assert 0.5 <= time.monotonic() - began < 9.5  # the default would be 10
    assert run.out.count("falls") == 1
