"""Faults of a cable between two namespaces, seen by an echo program, and its removal."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.link import SERVER_ADDRESS, inside, missing
from tests.support.namespaces import Cable, sweep
from tests.support.programs import Program, Programs, programs_in

# echoes its input, or sends pieces of `size` bytes and prints the number of each echo
SCRIPT = """
import socket, sys
if sys.argv[1] == "echo":
    with socket.create_server(("", 4711)) as server:
        print("listens", flush=True)
        peer, _ = server.accept()
        while data := peer.recv(1 << 16):
            peer.sendall(data)
else:
    size = int(sys.argv[2])
    with socket.create_connection((sys.argv[1], 4711), 20) as line:
        for number in range(10**9):
            line.sendall(bytes(size))
            left = size
            while left:
                left -= len(line.recv(left))
            print("echo", number, flush=True)
"""


@pytest.fixture
def cable() -> Iterator[Cable]:
    if reason := missing():
        pytest.skip(reason)
    with Cable() as cable:
        yield cable


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def start_in_namespace(programs: Programs, name: str, *args: object) -> Program:
    command, *rest = inside(name)
    return programs.start(
        str(shutil.which(command)), *rest, shutil.which("python3"), "train.py", *args
    )


def start_echo(programs: Programs, cable: Cable, size: int = 1) -> Program:
    start_in_namespace(programs, cable.server, "echo").wait_for("listens")
    client = start_in_namespace(programs, cable.worker, SERVER_ADDRESS, size)
    client.wait_for("echo", times=3)
    return client


def is_silent(client: Program) -> bool:
    """Return whether no echo arrives after those under way."""
    so_far = client.out.count("echo")
    try:
        client.wait_for("echo", times=so_far + 5, seconds=0.3)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("fault", ["down", "silence"])
def test_no_bytes_pass_until_the_cable_is_healed(
    fault: str, cable: Cable, programs: Programs
) -> None:
    client = start_echo(programs, cable)
    getattr(cable, fault)()

    assert is_silent(client)
    cable.up()
    cable.rate(1000)
    client.wait_for("echo", times=client.out.count("echo") + 20)


def test_a_cable_limits_its_rate(cable: Cable, programs: Programs) -> None:
    """1 MB each way takes 2 s at 8 Mbit/s, except for the first 256 KiB."""
    client = start_echo(programs, cable, size=1 << 20)
    cable.rate(8)

    assert is_silent(client)
    cable.rate(1000)
    client.wait_for("echo", times=client.out.count("echo") + 20)


def test_namespaces_are_removed_after_a_failure() -> None:
    if reason := missing():
        pytest.skip(reason)
    cable = Cable()
    with pytest.raises(ZeroDivisionError), cable:
        raise_error()

    assert not {cable.server, cable.worker} & namespaces()


def raise_error() -> None:
    raise ZeroDivisionError


def test_namespaces_of_killed_processes_are_removed() -> None:
    if reason := missing():
        pytest.skip(reason)
    dead = subprocess.Popen(["true"])
    dead.wait()
    name = f"psbench-{dead.pid}-server"
    subprocess.run(["ip", "netns", "add", name], check=True)

    sweep()

    assert name not in namespaces()


def namespaces() -> set[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[0] for line in listed.splitlines()}
