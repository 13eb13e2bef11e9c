"""Planted bugs in policy allreduce, by name; tests/sim/test_reduce.py finds each of them."""

from typing import Any

from pscommon.core.log_entries import SetBuffers, Staged
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.job import reduction as reduction_module
from psserver.core.job.job_state import JobState
from psserver.core.job.reduction import ReduceRequest, ReduceRound, Reduction

DROP = Reduction.drop


def shrink_round(reduction: Reduction, worker: int) -> None:
    """Let a round of gradients go on without a worker that departs."""
    open_round = reduction.open
    reduction.open = replace_requests(open_round, worker)
    DROP(reduction, worker)


def replace_requests(found: ReduceRound, worker: int) -> ReduceRound:
    return found._replace(requests=tuple(r for r in found.requests if r.worker != worker))


BEGIN = Reduction.begin


def begin_with_outdated(reduction: Reduction, kind: Any, requests: Any, source: int = 0) -> None:
    """Let workers that lack the newest weights reduce with the others."""
    BEGIN(reduction, "gradients" if kind == "weights" else kind, requests, source)


def forget_answers(reduction: Reduction, request: ReduceRequest, answer: ReduceRound) -> None:
    """Take a late repetition of a request for a new one."""
    del reduction.waiting[request.worker]


def replace_waiting(reduction: Reduction, request: ReduceRequest) -> None:
    """Let a worker that asks again without a decision stay in its round."""


CLOSE = Reduction.close


def keep_group(reduction: Reduction, is_void: bool = False) -> None:
    """Let workers use the process group of a void round again."""
    CLOSE(reduction)


def take_any_buffers(rounds: UpdateRounds, push: Staged) -> None:
    """Take an upload of any version for one of the newest."""
    job = rounds._job
    job.log.append(SetBuffers(job.log.next, push.key))
    rounds._forget(push.key)
    job.reduction.uploaded = job.version


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "numbers begin again after a restart": (reduction_module, "NUMBERS_PER_GENERATION", 0),
    "an upload of an older version is used": (UpdateRounds, "_set_buffers", take_any_buffers),
    "a round goes on without a lost worker": (Reduction, "drop", shrink_round),
    "workers without the newest weights reduce": (Reduction, "begin", begin_with_outdated),
    "an answer is not kept": (Reduction, "answer", forget_answers),
    "a void round keeps its group": (Reduction, "close", keep_group),
    "a worker that gives up a round stays in it": (Reduction, "leave_round", replace_waiting),
    "a snapshot has the weights of an earlier upload": (
        JobState,
        "has_newest_weights",
        property(lambda job: True),
    ),
}
