"""Ctrl-C while a command imports its code: the process exits with 130 and without output."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

INTERRUPTED_AT = """
import os, signal, sys

_, command, module, *args = sys.argv

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from pscommon import entry
sys.argv = [command, *args]
sys.exit(getattr(entry, command)())
"""


def run_interrupted(command: str, module: str, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run a command that gets Ctrl-C when it first imports `module`."""
    return subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED_AT, command, module, *args],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'common'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("command", "module", "args"),
    [
        ("ps_run", "click", ["train.py"]),
        ("ps_run", "structlog", ["train.py"]),
        ("ps_server", "click", []),
        ("ps_server", "torch", []),
        ("ps_server", "torch._C", []),  # an exception in there becomes an ImportError
        ("ps_server", "grpc", []),
        ("ps_worker", "psworker.connect", ["--ps", "127.0.0.1:1", "train.py"]),
        ("ps_worker", "torch.nn", ["--ps", "127.0.0.1:1", "train.py"]),
        ("ps_ctl", "click", ["explain", "12"]),
        ("ps_ctl", "grpc", ["--ps", "127.0.0.1:1", "status"]),
    ],
)
def test_ctrl_c_during_imports_exits_silently_with_130(
    command: str, module: str, args: list[str]
) -> None:
    done = run_interrupted(command, module, *args)

    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_an_ignored_sigint_stays_ignored() -> None:
    """Shells start background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = run_interrupted("ps_ctl", "click", "explain", "12")
    finally:
        signal.signal(signal.SIGINT, before)

    assert done.returncode == 0, done.stderr
    assert "no valid snapshot" in done.stdout
