"""The identity and the certain end of a process: PIDs are reused and hold in one namespace only."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pscommon.system import process_id as module
from pscommon.system.process_id import has_ended, is_running, process_id

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that runs until its stdin is closed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        yield process
        process.kill()


def test_a_running_process_has_not_ended() -> None:
    name = process_id()
    assert str(os.getpid()) in name.split("/")
    assert (is_running(name), has_ended(name)) == (True, False)


def test_the_end_of_a_process_is_seen_before_and_after_the_wait(
    child: "subprocess.Popen[bytes]",
) -> None:
    name = process_id(child.pid)
    assert (is_running(name), has_ended(name)) == (True, False)

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # the process is a zombie
    assert (is_running(name), has_ended(name)) == (False, True)
    child.wait()
    assert (is_running(name), has_ended(name)) == (False, True)


def test_a_reused_pid_is_another_process(child: "subprocess.Popen[bytes]") -> None:
    place, pid, started = process_id(child.pid).rsplit("/", 2)
    earlier = f"{place}/{pid}/{int(started) - 1}"
    assert (is_running(earlier), has_ended(earlier)) == (False, True)


@pytest.mark.parametrize("part", [0, 1])
def test_nothing_is_certain_about_another_boot_or_namespace(part: int) -> None:
    """Although no such PID exists here."""
    parts = process_id().split("/")
    parts[part], parts[2] = "0", "4194305"
    name = "/".join(parts)
    assert (is_running(name), has_ended(name)) == (False, False)


@pytest.mark.parametrize("name", ["", "x", "a/b/c", "a/1/-1", "//", "1/2/3/4/5", "a/b/1/²"])
def test_an_invalid_name_proves_nothing(name: str) -> None:
    assert (is_running(name), has_ended(name)) == (False, False)


def test_a_system_that_hides_processes_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = process_id()

    def denied(pid: int) -> tuple[str, int]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "_read_stat", denied)
    assert (process_id(), is_running(name), has_ended(name)) == ("", False, False)


def test_a_process_in_another_pid_namespace_has_another_name() -> None:
    """PID 1 there is another process; a /proc of the outer namespace gives no name."""
    code = "from pscommon.system.process_id import process_id; print(process_id())"
    for mount in (["--mount-proc"], []):
        line = ["unshare", "--pid", "--fork", *mount, sys.executable, "-c", code]
        found = subprocess.run(line, capture_output=True, text=True, check=False)
        if found.returncode:
            pytest.skip(found.stderr.strip())
        name = found.stdout.strip()
        assert bool(name) == bool(mount)
        assert (is_running(name), has_ended(name)) == (False, False)
