"""Every rule of the checker fires on a journal that was spoilt for it, and on no other; and
journals survive kills.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from tests.chaos.checker import Evidence, Rollback, check, duplicates
from tests.chaos.journal import Journal, Operation, parsed, read
from tests.support.process_job import MODULES
from tests.support.programs import Programs, programs_in

STEPS = 6
STATUS = {
    "version": STEPS,
    "data": [{"loop": 0, "ended": True, "committed": 2 * STEPS, "dropped": 0, "total": 12}],
}


def push(rank: int, step: int, **changed: object) -> Operation:
    """The step-th push of a worker; both workers are at work at the same time."""
    good = Operation(
        f"w{rank}.0",
        "push",
        begin=float(step),
        end=step + 0.5,
        worker=rank + 1,
        seq=step,
        before=step - 1,
        after=step,
        status="applied",
        batches=((0, 2 * (step - 1) + rank),),
        counters=(step, step),
        crc=100 * rank + step,
    )
    return replace(good, **changed)  # type: ignore[arg-type]


def run() -> list[Operation]:
    """Two workers in sync; the loop's twelve batches, and its end."""
    pushes = [push(rank, step) for step in range(1, STEPS + 1) for rank in range(2)]
    end = Operation(
        "w0.0", "lease", 7.0, 7.1, worker=1, status="none", batches=((0, -1),), total=12, ended=True
    )
    return [*pushes, end]


def evidence(changed: dict[int, dict[str, object]] | None = None, **terms: object) -> Evidence:
    """A good run, but for the operations of these places."""
    operations = run()
    for place, values in (changed or {}).items():
        operations[place] = replace(operations[place], **values)  # type: ignore[arg-type]
    known = {
        "operations": operations,
        "status": STATUS,
        "counters": (6.0, 6.0),
        "durability": "log",
        **terms,
    }
    return Evidence(**known)  # type: ignore[arg-type]


def fired(found: Evidence) -> set[str]:
    return {finding.rule for finding in check(found)}


def test_a_good_run_is_good() -> None:
    assert check(evidence()) == []


def test_a_job_that_was_told_to_end_need_not_be_through_its_data() -> None:
    assert check(evidence({4: {"batches": ()}}, told_to_end=7.0)) == []


def test_who_was_at_work_while_an_answer_was_late_may_have_come_ahead() -> None:
    """Worker 1's weights of version 1 were on their way while worker 2 made three steps; ssp 2
    lets it.
    """
    late = push(0, 1, end=5.0)
    others = [
        push(1, step, begin=1.0 + step, end=1.5 + step, before=step, after=step + 1)
        for step in (1, 2, 3)
    ]
    stale = push(0, 2, begin=5.1, end=5.2, before=1, after=5, staleness=3)

    found = asynchronous(operations=[late, *others, stale], policy="ssp", staleness=2)

    assert "staleness is bounded" not in fired(found)


def asynchronous(**terms: object) -> Evidence:
    """One worker alone: every push is an update."""
    operations = [
        operation for operation in run() if operation.worker == 1 and operation.kind == "push"
    ]
    status = {"version": STEPS, "data": []}
    return Evidence(
        **{
            "operations": operations,
            "policy": "async",
            "status": status,
            "counters": (6.0,),
            **terms,
        }
    )  # type: ignore[arg-type]


SEEN = Operation("w0.0", "pull", 3.6, 3.7, worker=1, status="none", after=5, counters=(5, 5))
"""A version that nobody was told had counted."""

PLANTED = {
    "a worker sees an older version": (
        evidence(operations=sorted([*run(), SEEN], key=lambda operation: operation.begin)),
        "versions never go back",
    ),
    "another worker sees an older version": (
        evidence({8: {"after": 0, "worker": 9, "process": "w0.1", "counters": ()}}),
        "acknowledged is seen by all",
    ),
    "a log that went back": (evidence(rollbacks=[Rollback(6.9, 6)]), "log never goes back"),
    "a key that counted twice": (evidence({4: {"seq": 2, "crc": 2}}), "keys count once"),
    "a key with two gradients": (evidence({4: {"seq": 2, "status": "error"}}), "keys count once"),
    "a stale gradient in sync": (evidence({5: {"staleness": 1}}), "staleness is bounded"),
    "a gradient beyond --max-staleness": (
        asynchronous(
            operations=[push(0, step, staleness=step) for step in range(1, 7)], max_staleness=5
        ),
        "staleness is bounded",
    ),
    "a gradient beyond what ssp allows": (
        asynchronous(
            operations=[push(0, step, staleness=step) for step in range(1, 7)],
            policy="ssp",
            staleness=2,
        ),
        "staleness is bounded",
    ),
    "a batch that counted twice": (
        evidence({4: {"batches": ((0, 4), (0, 0))}}),
        "batches count once",
    ),
    "a batch that was never used": (evidence({4: {"batches": ()}}), "loops are complete"),
    "a ledger that ended early": (
        evidence(status=STATUS | {"data": [STATUS["data"][0] | {"committed": 11}]}),
        "loops are complete",  # type: ignore[index]
    ),
    "an update that is not in the weights": (evidence({5: {"counters": (3, 2)}}), "sums are right"),
    "an update that is not in one shard's final weights": (
        evidence(counters=(6.0, 5.0)),
        "sums are right",
    ),
    "an acknowledged update that is lost": (
        evidence(status=STATUS | {"version": 5}, counters=(5.0,)),
        "acknowledged is recovered",
    ),
    "a push that counted and was never sent": (
        asynchronous(status={"version": 7}, counters=(7.0,)),
        "acknowledged is recovered",
    ),
    "an end that nobody saw": (evidence(status={}), "acknowledged is recovered"),
    "an acknowledged push that is lost": (
        asynchronous(
            status={"version": 5},
            counters=(5.0,),
            operations=[push(0, n, after=1) for n in range(1, 7)],
        ),
        "acknowledged is recovered",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_rule_fires_on_what_it_is_for_and_no_other_does(planted: str) -> None:
    found, rule = PLANTED[planted]

    assert fired(found) == {rule}


def test_an_answer_that_never_came_may_have_counted_or_not() -> None:
    """But its batch may not count twice."""
    lost = {"status": "error", "after": -1, "counters": ()}

    more = [*asynchronous().operations, push(0, 7, **lost)]

    assert fired(evidence({5: lost})) == set()
    assert fired(evidence({5: {"status": "", "end": inf, "after": -1, "counters": ()}})) == set()
    assert fired(asynchronous(operations=more)) == set()
    assert fired(asynchronous(operations=more, status={"version": 7}, counters=(7.0,))) == set()


def test_an_announced_rollback_excuses_what_it_undid_and_no_more() -> None:
    """Versions 5 and 6 are done again by workers that have joined again."""
    undone = [operation for operation in run() if operation.after > 4]
    again = [
        replace(
            old,
            worker=old.worker + 10,
            process=f"{old.process[:2]}.1",
            begin=old.begin + 10,
            end=old.end + 10,
        )
        for old in undone
    ]
    back = {"durability": "snapshot", "operations": [*run(), *again]}

    assert fired(evidence(**back, rollbacks=[Rollback(8.0, 4)])) == set()
    assert fired(evidence(**back)) == {"acknowledged is seen by all", "batches count once"}
    assert fired(evidence(**back, rollbacks=[Rollback(8.0, 5)])) == {"batches count once"}


def test_a_batch_that_counted_twice_is_counted_in_async() -> None:
    found = asynchronous(operations=[push(0, step, batches=((0, 0),)) for step in range(1, 7)])

    assert fired(found) == set()
    assert duplicates(found) == 5


# ---- journals ------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from tests.chaos.journal import Journal
journal = Journal(Path(sys.argv[1]), "w0.0")
with journal.operation("push", worker=3) as operation:
    operation.status, operation.after = "applied", 1
with journal.operation("push", worker=3):
    print("in it", flush=True)
    sys.stdin = sys.stdout = None
    import signal
    signal.pause()
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def test_a_killed_process_leaves_what_it_was_doing(programs: Programs, tmp_path: Path) -> None:
    killed = programs.start("python", "train.py", tmp_path / "journal", PYTHONPATH=MODULES)
    killed.wait_for("in it")
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()

    first, second = read(tmp_path / "journal")
    assert (first.status, first.after, first.worker) == ("applied", 1, 3)
    assert (second.status, second.end, second.doubtful) == ("", inf, True)


def test_what_a_call_raised_is_written_and_raised(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "w1.0")
    with pytest.raises(ZeroDivisionError), journal.operation("pull", worker=1):
        raise ZeroDivisionError("why")
    journal.close()

    (operation,) = read(tmp_path)
    assert (operation.status, operation.reason) == ("error", "ZeroDivisionError: why")
    assert operation.begin <= operation.end < inf


def test_a_line_that_was_torn_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "w0.0")
    with journal.operation("push", batches=((1, 2),)) as operation:
        operation.status = "applied"
    journal.close()
    text = (tmp_path / "w0.0.jsonl").read_text()
    begun, ended = parsed(text[:-2].split("\n")), parsed(text.split("\n"))

    assert (begun[0].status, ended[0].status, ended[0].batches) == ("", "applied", ((1, 2),))
