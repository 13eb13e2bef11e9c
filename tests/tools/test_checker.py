"""Each rule of the checker finds its own planted fault only; journals survive kills."""

import inspect
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from psworker.exchange.model_exchange import ModelExchange
from tests.chaos.checker import Evidence, Rollback, check, duplicates
from tests.chaos.client import JournaledModel
from tests.chaos.journal import Journal, Operation, parsed, read
from tests.support.process_job import MODULES
from tests.support.programs import Programs, programs_in

STEPS = 6
STATUS = {
    "version": STEPS,
    "data": [{"loop": 0, "ended": True, "committed": 2 * STEPS, "dropped": 0, "total": 12}],
}


def push(rank: int, step: int, **changed: object) -> Operation:
    """Return the push of one step of a worker; both workers run at the same time."""
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


def operations_of_run() -> list[Operation]:
    """Return a sync run of two workers through twelve batches, with the end of the loop."""
    pushes = [push(rank, step) for step in range(1, STEPS + 1) for rank in range(2)]
    end = Operation(
        "w0.0", "lease", 7.0, 7.1, worker=1, status="none", batches=((0, -1),), total=12, ended=True
    )
    return [*pushes, end]


def evidence(changed: dict[int, dict[str, object]] | None = None, **terms: object) -> Evidence:
    """Return the evidence of a correct run in which the operations at these indexes are changed."""
    operations = operations_of_run()
    for index, values in (changed or {}).items():
        operations[index] = replace(operations[index], **values)  # type: ignore[arg-type]
    known = {
        "operations": operations,
        "status": STATUS,
        "counters": (6.0, 6.0),
        "durability": "log",
        **terms,
    }
    return Evidence(**known)  # type: ignore[arg-type]


def broken_rules(found: Evidence) -> set[str]:
    return {finding.rule for finding in check(found)}


def test_a_correct_run_has_no_findings() -> None:
    assert check(evidence()) == []


def test_a_stopped_job_may_leave_data_unused() -> None:
    assert check(evidence({4: {"batches": ()}}, stopped_at=7.0)) == []


def test_a_late_answer_does_not_break_the_staleness_bound() -> None:
    """Worker 1 receives version 1 late, while worker 2 makes three steps; ssp 2 allows that."""
    late = push(0, 1, end=5.0)
    others = [
        push(1, step, begin=1.0 + step, end=1.5 + step, before=step, after=step + 1)
        for step in (1, 2, 3)
    ]
    stale = push(0, 2, begin=5.1, end=5.2, before=1, after=5, staleness=3)

    found = async_evidence(operations=[late, *others, stale], policy="ssp", staleness=2)

    assert "staleness is bounded" not in broken_rules(found)


def async_evidence(**terms: object) -> Evidence:
    """Return the evidence of one worker; each push is an update."""
    operations = [
        operation
        for operation in operations_of_run()
        if operation.worker == 1 and operation.kind == "push"
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


OBSERVED = Operation("w0.0", "pull", 3.6, 3.7, worker=1, status="none", after=5, counters=(5, 5))
"""A version that no push acknowledged."""

CASES = {
    "a worker sees an older version": (
        evidence(
            operations=sorted(
                [*operations_of_run(), OBSERVED], key=lambda operation: operation.begin
            )
        ),
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
        async_evidence(
            operations=[push(0, step, staleness=step) for step in range(1, 7)], max_staleness=5
        ),
        "staleness is bounded",
    ),
    "a gradient beyond what ssp allows": (
        async_evidence(
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
        async_evidence(status={"version": 7}, counters=(7.0,)),
        "acknowledged is recovered",
    ),
    "an end without a status": (evidence(status={}), "acknowledged is recovered"),
    "an acknowledged push that is lost": (
        async_evidence(
            status={"version": 5},
            counters=(5.0,),
            operations=[push(0, n, after=1) for n in range(1, 7)],
        ),
        "acknowledged is recovered",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_planted_fault_breaks_only_its_rule(case: str) -> None:
    found, rule = CASES[case]

    assert broken_rules(found) == {rule}


def test_an_unanswered_push_may_or_may_not_count() -> None:
    """Its batch may still count only once."""
    lost = {"status": "error", "after": -1, "counters": ()}

    operations = [*async_evidence().operations, push(0, 7, **lost)]

    assert broken_rules(evidence({5: lost})) == set()
    assert (
        broken_rules(evidence({5: {"status": "", "end": inf, "after": -1, "counters": ()}}))
        == set()
    )
    assert broken_rules(async_evidence(operations=operations)) == set()
    assert (
        broken_rules(async_evidence(operations=operations, status={"version": 7}, counters=(7.0,)))
        == set()
    )


def test_a_rollback_allows_only_undone_updates_to_repeat() -> None:
    """Rejoined workers repeat versions 5 and 6."""
    undone = [operation for operation in operations_of_run() if operation.after > 4]
    repeated = [
        replace(
            old,
            worker=old.worker + 10,
            process=f"{old.process[:2]}.1",
            begin=old.begin + 10,
            end=old.end + 10,
        )
        for old in undone
    ]
    run = {"durability": "snapshot", "operations": [*operations_of_run(), *repeated]}

    assert broken_rules(evidence(**run, rollbacks=[Rollback(8.0, 4)])) == set()
    assert broken_rules(evidence(**run)) == {"acknowledged is seen by all", "batches count once"}
    assert broken_rules(evidence(**run, rollbacks=[Rollback(8.0, 5)])) == {"batches count once"}


def test_async_reports_the_number_of_duplicate_batches() -> None:
    found = async_evidence(operations=[push(0, step, batches=((0, 0),)) for step in range(1, 7)])

    assert broken_rules(found) == set()
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


def test_the_journal_of_a_killed_process_has_its_open_operation(
    programs: Programs, tmp_path: Path
) -> None:
    killed = programs.start("python", "train.py", tmp_path / "journal", PYTHONPATH=MODULES)
    killed.wait_for("in it")
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()

    first, second = read(tmp_path / "journal")
    assert (first.status, first.after, first.worker) == ("applied", 1, 3)
    assert (second.status, second.end, second.doubtful) == ("", inf, True)


def test_an_exception_is_journaled_and_raised(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "w1.0")
    with pytest.raises(ZeroDivisionError), journal.operation("pull", worker=1):
        raise ZeroDivisionError("why")
    journal.close()

    (operation,) = read(tmp_path)
    assert (operation.status, operation.reason) == ("error", "ZeroDivisionError: why")
    assert operation.begin <= operation.end < inf


def test_a_torn_journal_line_is_ignored(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "w0.0")
    with journal.operation("push", batches=((1, 2),)) as operation:
        operation.status = "applied"
    journal.close()
    text = (tmp_path / "w0.0.jsonl").read_text()
    begun, ended = parsed(text[:-2].split("\n")), parsed(text.split("\n"))

    assert (begun[0].status, ended[0].status, ended[0].batches) == ("", "applied", ((1, 2),))


def test_the_client_with_a_journal_takes_what_a_client_takes() -> None:
    found = inspect.signature(JournaledModel.exchange).parameters
    assert list(found) == list(inspect.signature(ModelExchange.exchange).parameters)
