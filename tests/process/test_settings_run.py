"""Each setting of ps-run changes a run.

Most tests compare a run with all settings and a run without any.
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
from tests.support.curves import curves
from tests.support.ports import free_ports
from tests.support.programs import Program, Programs, programs_in
from tests.support.settings_coverage import run_setting

# Prints what it observes of the job, then trains for four steps.
SCRIPT = """
import json, os, sys, urllib.request
import numpy as np, torch, psworker
from contextlib import closing
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import JOIN, Stub
from psproto.v1 import coordinator_pb2 as co

VARIABLES = ("PS_DEVICE", "PS_CONNECT_TIMEOUT", "PS_LANES", "PS_OVERLAP")

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
    with closing(open_channel(Endpoint(client.addresses[0]))) as channel:
        joined = Stub(channel, JOIN)(co.JoinRequest(format=3), timeout=20)
    alive = [
        urllib.request.urlopen(f"http://{address}/livez", timeout=20).status
        for address in sys.argv[1:]
    ]
    environment = {name: os.environ.get(name) for name in VARIABLES}
    environment["second"] = second()
    facts = {"threads": torch.get_num_threads(), "lease": joined.lease_ms, "alive": alive}
    print(json.dumps({**client.status(), **facts, **environment}))
    for _ in range(4):
        client.push({"w": np.ones(100)})
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs_in(tmp_path_factory.mktemp("run")) as programs:
        programs.script(SCRIPT)
        yield programs


@pytest.fixture(scope="module")
def chosen(programs: Programs) -> Program:
    """A run with every setting except --max-restarts and --grace, after the snapshot of an earlier
    job.
    """
    write_earlier_snapshot(programs.folder / "job")
    metrics = [f"127.0.0.1:{port}" for port in free_ports(3)]
    line = (
        "--servers 2 --workers 1 --summary s.json --history h.csv --save m.safetensors --log-dir "
        "logs --policy ssp --staleness 3 --max-staleness 9 --min-workers 1 --lease 77s --job "
        "otter --data-dir job --snapshot-every 1steps --snapshot-keep 2 --resume never "
        f"--connect-timeout 33s --device cpu --threads 2 --metrics-bind {metrics[0]} --log-level "
        "warning --log-format json --lanes grpc --overlap on --in-flight 448 --tensorboard curves"
    )
    return require_success(programs.run("ps-run", *line.split(), "train.py", *metrics))


@pytest.fixture(scope="module")
def fault_settings(programs: Programs) -> Program:
    """A run with all settings for faults."""
    line = (
        "--workers 2 --min-workers 1 --progress-timeout 66s --on-worker-loss wait:44s "
        "--scale-workers 1..2 "
        "--backup-workers 1 --bad-gradients skip --max-norm 1e9 "
        "--quarantine-after 5 --data-dir careful --durability log --log-fsync no"
    )
    return require_success(programs.run("ps-run", *line.split(), "train.py"))


@pytest.fixture(scope="module")
def default(programs: Programs) -> Program:
    """A run with no setting except the number of workers."""
    return require_success(programs.run("ps-run", "--workers", 2, "train.py"))


def require_success(run: Program) -> Program:
    assert run.wait() == 0, run.output
    return run


def write_earlier_snapshot(data_dir: Path) -> None:
    """Write a snapshot of version 1."""
    cluster = Cluster(1, data_dir=data_dir)
    with Client(cluster.address) as client:
        client.register({"w": np.zeros(100)}, psworker.OptimizerSpec("sgd", lr=1.0))
        client.push({"w": np.ones(100)})
    cluster.stop()


def worker_report(run: Program) -> dict[str, Any]:
    """Return what the first worker printed about the job."""
    line = next(line for line in run.out.splitlines() if "] {" in line)
    document: dict[str, Any] = json.loads(line.partition("] ")[2])
    return document


@run_setting("servers", "workers")
def test_servers_and_workers(chosen: Program, default: Program) -> None:
    for run, servers, workers in ((chosen, 2, 1), (default, 1, 2)):
        assert len(worker_report(run)["servers"]) == servers
        assert (
            len({line.split()[0] for line in run.out.splitlines() if line.startswith("[w")})
            == workers
        )


# key of the worker's report, and its values in a run with the setting and in one without
OBSERVED: dict[str, tuple[str, Any, Any]] = {
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
    "in_flight": ("second", False, True),  # a push has 832 bytes, at most 448 on one of two servers
    "metrics_bind": ("alive", [200, 200, 200], []),
}


@run_setting(*OBSERVED)
@pytest.mark.parametrize(("name", "with_it", "without"), OBSERVED.values(), ids=OBSERVED.keys())
def test_settings_that_a_worker_observes(
    chosen: Program, default: Program, name: str, with_it: object, without: object
) -> None:
    assert worker_report(chosen)[name] == with_it
    if name != "PS_DEVICE":  # what auto selects depends on the machine
        assert worker_report(default)[name] == without


# values in a run with all settings for faults and in one without
FAULT_SETTINGS: dict[str, tuple[Any, Any]] = {
    "on_worker_loss": ("wait:44", "shrink"),
    "progress_timeout": (66.0, None),
    "scale_workers": ("1..2", None),
    "backup_workers": (1, 0),
    "bad_gradients": ("skip", "abort"),
    "max_norm": (1e9, None),
    "quarantine_after": (5, None),
    "durability": ("log", "snapshot"),
    "log_fsync": ("no", "everysec"),
}


@run_setting(*FAULT_SETTINGS)
def test_fault_settings_that_a_worker_observes(fault_settings: Program, default: Program) -> None:
    assert {name: worker_report(fault_settings)[name] for name in FAULT_SETTINGS} == {
        name: row[0] for name, row in FAULT_SETTINGS.items()
    }
    assert {name: worker_report(default)[name] for name in FAULT_SETTINGS} == {
        name: row[1] for name, row in FAULT_SETTINGS.items()
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
    """--backup-workers excludes it, so it needs its own run."""
    assert (
        worker_report(require_success(programs.run("ps-run", "--global-batch", 64, "train.py")))[
            "global_batch"
        ]
        == 64
    )
    assert worker_report(default)["global_batch"] is None


@run_setting("job")
def test_job(chosen: Program, default: Program) -> None:
    assert worker_report(chosen)["job"] == "otter"
    assert worker_report(default)["job"].startswith("job-")


@run_setting("data_dir", "snapshot_every", "snapshot_keep", "resume")
def test_snapshots(programs: Programs, chosen: Program) -> None:
    """Two of four snapshots remain. The snapshot of the earlier job is set aside, not resumed."""
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


@run_setting("tensorboard")
def test_tensorboard(programs: Programs, chosen: Program, default: Program) -> None:
    (found,) = programs.folder.glob("*/events.out.tfevents.*")
    assert found.parent.name == "curves"
    assert curves(found.parent)["job/learning_rate"][-1] == (4, 1.0)


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
    """The first worker is killed and not restarted. The second worker ignores SIGTERM and is
    killed.
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
    os.mkfifo(programs.folder / "stubborn")  # opening either end waits for the other
    flags = ("--workers", 2, "--max-restarts", 0, "--grace", "500ms")
    run = programs.start("ps-run", *flags, "falls.py")
    run.wait_for("falls")
    began = time.monotonic()

    assert run.wait() == 137
    assert 0.5 <= time.monotonic() - began < 9.5  # the default would be 10
    assert run.out.count("falls") == 1


# Waits until the page that the browser opened has shown the job.
OPENED = """
import os, sys, time, urllib.request
import numpy as np, psworker

with psworker.Client() as client:
    client.register({"w": np.zeros(100)}, psworker.OptimizerSpec("sgd", lr=1.0))
    deadline = time.monotonic() + 30
    while not os.path.exists(sys.argv[1]) and time.monotonic() < deadline:
        client.push({"w": np.ones(100)})
    print("opened", open(sys.argv[1]).read().strip())
    page = client.status()["page"]
    print("page", page)
    print("title", b"<title>paramserver</title>" in urllib.request.urlopen(page).read())
"""


@run_setting("open")
def test_open(programs: Programs, default: Program) -> None:
    """It opens the page in the user's browser; every run prints its address."""
    browser = programs.script(
        '#!/bin/sh\necho "$1" > opened.new; mv opened.new opened\n', "browser"
    )
    browser.chmod(0o755)
    script = programs.script(OPENED, "opened.py")
    opened = programs.folder / "opened"
    assert not opened.exists()

    run = require_success(programs.run("ps-run", "--open", script, opened, BROWSER=f"{browser} %s"))

    page = opened.read_text().strip()
    assert f"live page: {page}" in run.output
    assert f"opened {page}" in run.output
    assert f"page {page}" in run.output
    assert "title True" in run.output
    assert "live page: http://127.0.0.1:" in default.output
