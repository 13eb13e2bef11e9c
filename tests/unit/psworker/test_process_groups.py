"""Process groups of policy allreduce: an operation that is given up harms nothing later."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pscommon.core.errors import UnreachableError
from psworker.core.results import ReduceAnswer
from psworker.steps import process_groups
from psworker.steps.process_groups import ProcessGroups, ReduceFailedError
from tests.support.workers import together, until

HOST = "127.0.0.1"
NO_BUFFERS = torch.zeros(0, dtype=torch.uint8)
Make = Callable[[], ProcessGroups]


@pytest.fixture
def groups() -> Iterator[Make]:
    with ExitStack() as stack:

        def make() -> ProcessGroups:
            made = ProcessGroups(HOST, 8)
            stack.callback(made.close)
            return made

        yield make


def connect(number: int, *members: ProcessGroups) -> None:
    workers = tuple(range(1, len(members) + 1))
    found = ReduceAnswer(
        "gradients", 1, number, workers, (1,) * len(members), 1, members[0].address
    )
    together(*[partial(m.connect, found, worker) for worker, m in enumerate(members, 1)])


def values(member: ProcessGroups) -> Tensor:
    return member.memory.view(torch.float32)


def reduce(member: ProcessGroups, own: float, is_open: bool = True) -> list[float]:
    values(member).fill_(own)
    member.reduce([values(member)], NO_BUFFERS, lambda: is_open)
    return values(member).tolist()


def test_members_add_up_and_collect(groups: Make) -> None:
    members = groups(), groups()
    connect(1, *members)

    assert together(*[partial(reduce, each, 2.0) for each in members]) == [[4.0, 4.0]] * 2

    own = [torch.tensor([rank, 255], dtype=torch.uint8) for rank in range(2)]
    found = together(
        *[
            partial(m.reduce, [], bytes_, lambda: True)
            for m, bytes_ in zip(members, own, strict=True)
        ]
    )
    assert [[each.tolist() for each in one] for one in found] == [[[0, 255], [1, 255]]] * 2


def test_weights_travel_in_pieces(groups: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo limits the time of an operation, however many bytes it has."""
    monkeypatch.setattr(process_groups, "MAX_PIECE_BYTES", 24)
    members = groups(), groups()
    connect(1, *members)
    tensors = [torch.arange(8) * factor for factor in (2, 0)]

    together(
        *[
            partial(m.send, tensor, 0, lambda: True)
            for m, tensor in zip(members, tensors, strict=True)
        ]
    )

    assert tensors[1].tolist() == [*range(0, 16, 2)]
    assert len(members[0]._works) == 3


def test_a_late_member_writes_to_no_memory_in_use(groups: Make) -> None:
    """As after SIGSTOP and SIGCONT: the operation that one member gave up then completes."""
    first, late = groups(), groups()
    connect(1, first, late)
    before = first.memory
    with pytest.raises(ReduceFailedError, match="its round is void"):
        reduce(first, 1.0, is_open=False)
    now = first.memory.clone()

    assert reduce(late, 2.0) == [3.0, 3.0]

    until(lambda: before.view(torch.float32).tolist() == [3.0, 3.0], "a late write")
    assert torch.equal(first.memory, now)


def test_a_new_group_works_beside_a_stuck_one(groups: Make) -> None:
    first, stuck, other = groups(), groups(), groups()
    connect(1, first, stuck)
    with pytest.raises(ReduceFailedError):
        reduce(first, 1.0, is_open=False)

    connect(2, first, other)

    assert together(partial(reduce, first, 1.0), partial(reduce, other, 2.0)) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("fenced")], ids=repr)
def test_any_error_gives_the_operation_up(groups: Make, error: BaseException) -> None:
    """Of the question whether the round is open, or of the gradients, which come one by one."""
    first, late = groups(), groups()
    connect(1, first, late)
    before = first.memory

    def sums() -> Iterator[Tensor]:
        yield values(first)
        raise error

    with pytest.raises(type(error)):
        first.reduce(sums(), NO_BUFFERS, lambda: True)

    assert first.memory is not before


def test_a_group_without_a_pending_operation_is_freed(groups: Make) -> None:
    first, late = groups(), groups()
    connect(1, first, late)

    first.drop()

    assert not first._given_up


def listeners() -> set[str]:
    """Return the addresses on which this process listens, in the kernel's notation."""
    own = set[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one of this loop
            own.add(os.readlink(descriptor))
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_a_worker_that_never_reaches_the_others_gives_up(
    groups: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connected group in between shows that the others can be reached."""
    alone, other = groups(), groups()
    missing = ReduceAnswer("gradients", 1, 1, (1, 2), (1, 1), 1, alone.address)
    monkeypatch.setattr(process_groups, "CONNECT_SECONDS", 0.01)
    failures = process_groups.MAX_FAILED_CONNECTS_COUNT

    def fail() -> None:
        for _ in range(failures - 1):
            with pytest.raises(ReduceFailedError, match="the process group failed"):
                alone.connect(missing, 1)

    fail()
    with monkeypatch.context() as patch:
        patch.setattr(process_groups, "CONNECT_SECONDS", 10.0)
        connect(2, alone, other)
    fail()
    with pytest.raises(UnreachableError, match=r"do not reach each other.*Try: "):
        alone.connect(missing, 1)


def test_store_and_group_listen_on_loopback_and_end(groups: Make) -> None:
    before = listeners()
    members = groups(), groups()
    connect(1, *members)

    found = listeners() - before
    assert found
    assert all(each.startswith("0100007F:") for each in found), found
    port = f"{int(members[0].address.rpartition(':')[2]):04X}"
    assert any(each.endswith(port) for each in found)

    for each in members:
        each.close()
        each.close()
    until(lambda: not any(each.endswith(port) for each in listeners()), "a closed store", 5)


SCRIPT = """
from tests.unit.psworker.test_process_groups import *
first, late = ProcessGroups("127.0.0.1", 8), ProcessGroups("127.0.0.1", 8)
connect(1, first, late)
try:
    reduce(first, 1.0, is_open=False)
except ReduceFailedError:
    first.close()
    print("closed")
late._group = None
"""


@pytest.mark.full
def test_a_stuck_operation_does_not_delay_the_end_of_a_process() -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[3],
        env={"PYTHONPATH": ".:common", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
