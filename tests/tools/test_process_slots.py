"""Two process tests run at a time; a test that measures time runs without other process tests."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process_slots import SLOTS

HOLD = """
import sys
from pathlib import Path
from tests.support.process_slots import ProcessSlots, slots_of
with ProcessSlots(Path(sys.argv[1])).hold(slots_of(sys.argv[2], sys.argv[3] == "timing")):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("worker", "kind", "free"),
    [
        ("gw0", "process", {1}),
        ("gw1", "process", {0}),
        ("gw2", "process", {1}),
        ("gw1", "timing", set()),
    ],
)
def test_free_slots_during_a_test(tmp_path: Path, worker: str, kind: str, free: set[int]) -> None:
    line = [sys.executable, "-c", HOLD, str(tmp_path / "slots"), worker, kind]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (tmp_path / "slots").open("r+b") as slots:
            assert {slot for slot in range(SLOTS) if _take(slots.fileno(), slot)} == free
        other.communicate("\n")


def _take(descriptor: int, slot: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
    except BlockingIOError:
        return False
    return True
