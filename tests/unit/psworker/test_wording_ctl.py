"""The texts of ps-ctl: WHAT failed: WHY. Try: HOW; and its findings and notes.

Other tests assert exit codes, reasons and the states of findings. A changed text changes this file.
"""

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import click
import pytest

from pscommon.core.errors import PSError, UnreachableError
from pscommon.core.exit_codes import ExitCode
from psproto.v1 import coordinator_pb2 as pb
from psworker.core.server_search import ServerDescription
from psworker.ctl import checks, config, explain, job_actions, job_client, output, rpc_speed, views
from psworker.ctl import snapshot as snapshot_commands
from psworker.ctl.context import CommandContext
from psworker.ctl.pass_text import pass_text
from tests.support.wording import check_form

REASONS = ", ".join([*explain.ERRORS, *explain.OUTCOMES])
CODES = ", ".join(str(int(code)) for code in ExitCode)


def job_settings(*flags: str) -> None:
    """Ask for the settings of a job of an older release, which does not report them."""
    servers = Mock(address="h:1", status=dict)
    servers.__enter__ = lambda self: self
    servers.__exit__ = lambda self, *error: None
    context = Mock(servers=lambda: servers)
    config._job_settings(context, flags)


def unregistered() -> None:
    client = job_client.CoordinatorClient.__new__(job_client.CoordinatorClient)
    client.described, client._timeout, client._peer = Mock(job="job"), 1.0, "shard 0 at h:1"
    answer = pb.RegisterResponse(state=pb.RegisterResponse.STATE_PENDING, waiting_for="a worker")
    client._stub = Mock(Register=lambda request, timeout: answer)
    client.plan()


def unknown_shard_0() -> None:
    described = ServerDescription("job", 1, 2, (), "")
    answers = Mock(side_effect=[UnreachableError("a:1 does not answer"), described])
    with patch.object(job_client, "describe", answers):
        job_client._find_coordinator(["a:1", "b:1"], 1.0)


def closed_stdout() -> None:
    with patch.object(sys, "stdout", None):
        output.show("json", {}, list)


def full_stdout() -> None:
    with Path("/dev/full").open("w") as file, patch.object(sys, "stdout", file):
        output.show("json", {}, list)


def set_policy(name: str, staleness: int | None) -> None:
    command = job_actions.set_.callback
    assert command is not None
    with click.Context(job_actions.set_, obj=CommandContext()):
        command(name=name, staleness=staleness, max_staleness=None)


def snapshot_folder(folder: Path, version: int) -> Path:
    path = folder / "snapshots" / f"{version:012d}"
    path.mkdir(parents=True)
    (path / "MANIFEST.json").write_text("{}")
    return path


def other_version(folder: Path) -> None:
    snapshot_commands._snapshots(snapshot_folder(folder, 3), 4)


def no_valid_snapshot(folder: Path) -> None:
    snapshot_folder(folder, 3)
    snapshots, _ = snapshot_commands._snapshots(folder, None)
    snapshot_commands._newest(snapshots)


def no_port() -> None:
    rpc_speed._bind(Mock(add_insecure_port=Mock(side_effect=RuntimeError("no ports left"))))


def finding(found: checks.Finding) -> str:
    return f"{found.state}: {found.text}. Try: {found.remedy}"


def failing_import(error: Exception, check: Callable[[], checks.Finding]) -> str:
    class Importer:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "torch":
                raise error

    with patch.dict(sys.modules), patch.object(sys, "meta_path", [Importer(), *sys.meta_path]):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        return finding(check())


def missing_package() -> str:
    with patch.object(checks, "PACKAGES", ("no_such_package",)):
        return finding(checks.packages())


def broken_gpu() -> str:
    import torch

    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: 1),
        patch.object(torch.cuda, "get_device_name", Mock(side_effect=RuntimeError("busy\nmore"))),
    ):
        return finding(checks.devices())


def little_memory(folder: Path) -> str:
    (folder / "meminfo").write_text("MemTotal: 2000000 kB\nMemAvailable: 1000 kB\n")
    return finding(checks.memory(folder / "meminfo"))


def taken_port() -> str:
    probe = Mock()
    probe.__enter__ = lambda self: self
    probe.__exit__ = lambda self, *error: None
    probe.bind.side_effect = OSError(errno.EADDRINUSE, "Address already in use")
    with patch.object(checks.socket, "socket", lambda: probe):
        return finding(checks.port(50051))


def little_space(check: Callable[[Path], checks.Finding], folder: Path) -> str:
    with (
        patch.object(checks.shutil, "disk_usage", lambda path: Mock(free=1000, total=2000)),
        patch.object(checks.time, "perf_counter", lambda: 0.0),
    ):
        return finding(check(folder))


def loopback(measure: Mock) -> str:
    with patch.object(rpc_speed, "measure", measure):
        return finding(checks.loopback())


def reason_of(**worker: Any) -> str:
    return views._reason(worker)


def refused_stop() -> str:
    servers = Mock(described=Mock(job="job"))
    servers.status.return_value = {"version": 3, "workers": [{"state": "active"}]}
    with patch.object(job_actions.click, "confirm", Mock(return_value=True)) as confirm:
        job_actions._confirm(servers)
    return str(confirm.call_args.args[0])


FAILURES: dict[str, Callable[[Path], object]] = {
    "address of another command": lambda folder: config._local_settings("server", ("--ps", "h:1")),
    "flags with a job": lambda folder: job_settings("--lease"),
    "older release": lambda folder: job_settings(),
    "no model": lambda folder: unregistered(),
    "no shard 0": lambda folder: unknown_shard_0(),
    "closed stdout": lambda folder: closed_stdout(),
    "full stdout": lambda folder: full_stdout(),
    "port of 127.0.0.1": lambda folder: no_port(),
    "exit code": lambda folder: explain.explanation("99"),
    "reason": lambda folder: explain.explanation("no-such-reason"),
    "staleness": lambda folder: set_policy("ssp", None),
    "version": other_version,
    "no snapshots": lambda folder: snapshot_commands._snapshots(folder, None),
    "no valid snapshot": no_valid_snapshot,
}
MESSAGES: dict[str, Callable[[Path], str]] = {
    # ps-ctl doctor
    "package": lambda folder: missing_package(),
    "torch": lambda folder: failing_import(ImportError("no libgomp"), checks.torch),
    "device without torch": lambda folder: failing_import(OSError("no libgomp"), checks.devices),
    "device": lambda folder: broken_gpu(),
    "unknown memory": lambda folder: finding(checks.memory(folder / "missing")),
    "memory": little_memory,
    "port": lambda folder: taken_port(),
    "missing folder": lambda folder: finding(checks.data_dir(folder / "missing")),
    "disk": lambda folder: little_space(checks.data_dir, folder),
    "no shared memory": lambda folder: finding(checks.shared_memory(folder / "missing")),
    "shared memory": lambda folder: little_space(checks.shared_memory, folder),
    "loopback": lambda folder: loopback(Mock(side_effect=PSError("no answer"))),
    "slow loopback": lambda folder: loopback(Mock(return_value=rpc_speed.RpcSpeed(9.0, 9.0))),
    # ps-ctl explain
    "signal": lambda folder: str(explain.explanation("137")["meaning"]),
    "remedy of a signal": lambda folder: explain.SIGNAL_REMEDY,
    "drained": lambda folder: str(explain.explanation("DRAINED")["meaning"]),
    "stale": lambda folder: str(explain.explanation("STALE")["meaning"]),
    "remedy of stale": lambda folder: str(explain.explanation("STALE")["what_to_do"]),
    # ps-ctl status and stop
    "hanging worker": lambda folder: reason_of(health="hanging", no_call_seconds=200.0),
    "draining worker": lambda folder: reason_of(draining=True),
    "pass": lambda folder: pass_text(
        {"pass": 2, "passes": 5, "percent": 43.2, "remaining_seconds": 12.3}
    ),
    "stop": lambda folder: refused_stop(),
}
TEXTS: dict[str, str] = {
    "address of another command": (
        "`--ps` after the command is not valid. Try: `ps-ctl --ps HOST:PORT config`"
    ),
    "flags with a job": (
        "`--ps` excludes `--lease`: it shows the settings of a running job. Try: leave out one "
        "of them"
    ),
    "older release": (
        "cannot show settings: h:1 runs an older release, which does not report them"
    ),
    "no model": "the model is not registered yet: the job waits for a worker",
    "no shard 0": (
        "a:1 does not answer; b:1 is shard 1 and does not know the address of shard 0 yet"
    ),
    "closed stdout": "cannot print the result: stdout is closed",
    "full stdout": "cannot print the result: No space left on device",
    "port of 127.0.0.1": "cannot bind a port of 127.0.0.1: no ports left",
    "exit code": "unknown exit code 99: they are CODES, and 128 + n for signal n",
    "reason": "unknown exit code or reason NO_SUCH_REASON: reasons are REASONS",
    "staleness": (
        "`--staleness S` is required with ssp and not allowed otherwise. Try: policy set ssp "
        "--staleness 3"
    ),
    "version": (
        "`--version 4` is not valid: DIR is the snapshot of version 3. Try: leave out `--version`"
    ),
    "no snapshots": (
        "there are no snapshots in DIR. Try: the `--data-dir` of the servers, or a path "
        "printed by `snapshot list`"
    ),
    "no valid snapshot": (
        "no snapshot in DIR/snapshots is valid. Try: `ps-ctl snapshot verify DIR`, which shows "
        "the damage"
    ),
    "package": ("problem: no_such_package is not installed. Try: pip install paramserver"),
    "torch": "problem: cannot be imported: no libgomp. Try: pip install 'torch>=2.6'",
    "device without torch": "problem: unknown without torch. Try: install torch first",
    "device": (
        "problem: torch cannot use its GPU: busy. Try: check nvidia-smi, or use --device cpu"
    ),
    "unknown memory": (
        "warning: unknown: FileNotFoundError(2, 'No such file or directory'). Try: check that "
        "memory holds 4 times the weights"
    ),
    "memory": (
        "warning: 1.02 MB available of 2.05 GB. Try: free some memory: with Adam a server "
        "needs about 4 times its share of the weights"
    ),
    "port": (
        "problem: cannot be bound: Address already in use. Try: stop the process that uses it, "
        "or set --bind HOST:PORT (port 0 picks a free port)"
    ),
    "missing folder": (
        "problem: cannot be written: No such file or directory. Try: choose another --data-dir"
    ),
    "disk": (
        "warning: writable, 1 kB free, 1 MiB on disk in 0.0 ms. Try: free some space: with "
        "Adam each snapshot takes up to 3 times the weights"
    ),
    "no shared memory": (
        "warning: missing: No such file or directory. Try: mount a tmpfs; DataLoader workers "
        "need it"
    ),
    "shared memory": (
        "warning: 1 kB free of 2 kB. Try: use docker run --shm-size=1g; DataLoader workers may "
        "need more"
    ),
    "loopback": "problem: no answer. Try: check firewall, proxies and security modules",
    "slow loopback": (
        "warning: 9.00 ms a call, 9 MB/s in both directions. Try: reduce the load of this "
        "machine; slow calls slow down every step"
    ),
    "signal": "ended by SIGKILL (128 + 9)",
    "remedy of a signal": (
        "find the sender of the signal: `dmesg` reports SIGKILL after memory exhaustion; "
        "SIGSEGV, SIGBUS and SIGABRT are crashes of native code, see the log"
    ),
    "drained": "the worker was asked to leave, or the job has ended",
    "stale": ("a push was too old: older than --max-staleness versions, or its round was closed"),
    "remedy of stale": (
        "nothing, training continues; if frequent, raise --max-staleness or find out why this "
        "worker is slow"
    ),
    "hanging worker": "no call from its script for 3 m 20 s",
    "draining worker": "asked to leave",
    "pass": "pass 2 of 5: 43 %, 12 s left",
    "stop": "End job job (version 3, 1 worker)?",
}


def text_of(name: str, folder: Path) -> str:
    if name in MESSAGES:
        text = MESSAGES[name](folder)
    else:
        with pytest.raises((PSError, click.UsageError)) as caught:
            FAILURES[name](folder)
        text = str(caught.value)
    return text.replace(str(folder), "DIR").replace(REASONS, "REASONS").replace(CODES, "CODES")


@pytest.mark.parametrize("name", [*FAILURES, *MESSAGES])
def test_text(name: str, tmp_path: Path) -> None:
    assert text_of(name, tmp_path) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_at_most_one_remedy_and_is_short(name: str) -> None:
    check_form(TEXTS[name])
