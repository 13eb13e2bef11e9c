"""What ps-run gives processes on Ray, and how an actor treats its process, without a cluster."""

import sys
from pathlib import Path
from typing import Any

import pytest

from psworker.run.cli import main
from psworker.run.ray_node import NodeProcess
from tests.support.workers import until


def start(node: NodeProcess, tmp_path: Path, code: str, **settings: Any) -> None:
    defaults: dict[str, Any] = {
        "name": "s1",
        "command": [sys.executable, "-c", code],
        "environment": {"PS_FOLDER": "/driver/tokens", "OMP_NUM_THREADS": "3"},
        "forced": ["OMP_NUM_THREADS"],
        "folder": "/driver",
        "python": sys.executable,
        "files": {"tokens": b"secret"},
        "cwd": str(tmp_path),
        "marker": None,
        "port_file": None,
        "traceback_file": "s1.traceback",
    }
    node.start(defaults | settings)


def events(node: NodeProcess) -> list[tuple[str, Any, Any]]:
    """Return all events to the exit."""
    found: list[tuple[str, Any, Any]] = []
    while not found or found[-1][0] != "exit":
        found = node.poll(0)
    return found


def test_ray_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    assert main(["--on", "ray", __file__]) == 2
    assert "Try: `pip install 'paramserver[ray]'`" in capfd.readouterr().err


def test_a_process_finds_the_files_of_the_run_in_a_folder_of_its_node(tmp_path: Path) -> None:
    """The variables and the words of its command name that folder. It is removed at the end."""
    code = "import os; path = os.environ['PS_FOLDER']; print(path, open(path).read())"
    node = NodeProcess()
    start(node, tmp_path, code)
    (_, _, line), end = events(node)

    path, content = line.split()
    assert content == "secret"
    assert not path.startswith("/driver")
    assert not Path(path).exists()
    assert end == ("exit", 0, [])


def test_events_whose_answer_was_lost_are_sent_again(tmp_path: Path) -> None:
    node = NodeProcess()
    start(node, tmp_path, "print(1)")
    first = events(node)

    assert node.poll(0) == first
    assert node.poll(len(first)) == []


def test_the_port_is_reported_while_the_server_runs(tmp_path: Path) -> None:
    code = "import signal; open('/driver/s1.port', 'w').write('4000'); signal.pause()"
    node = NodeProcess()
    start(node, tmp_path, code, port_file="s1.port")
    until(lambda: ("file", "s1.port", "4000") in node.poll(0), "the port")

    node.send("kill")
    assert events(node)[-1] == ("exit", -9, [])


def test_a_server_refuses_a_node_without_the_data_directory(tmp_path: Path) -> None:
    node = NodeProcess()
    start(node, tmp_path, "print(1)", marker=tmp_path / "data" / ".run")
    (_, stream, line), end = events(node)

    assert stream == "stderr"
    assert "Try: a directory on a shared file system" in line
    assert end == ("exit", 2, [])


def test_a_process_that_was_ended_before_its_start_does_not_start(tmp_path: Path) -> None:
    node = NodeProcess()
    node.send("terminate")
    start(node, tmp_path, "print(1)")

    assert events(node) == [("exit", -15, [])]
