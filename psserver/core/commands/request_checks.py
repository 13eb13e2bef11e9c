"""Checks of requests before they become commands of the coordinator.

They depend on the job's state, or on texts. The numbers are in their ranges: that was checked when
the message was decoded (pscommon/wire/ranges.py). A refused request changes nothing and is not
recorded, so a replay does not contain it. The state machine does not call these checks: it replays
commands of earlier releases unchanged.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from pscommon.core import limits
from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey, PushKey, Staged
from pscommon.core.model_spec import ModelSpec
from pscommon.core.script_place import PassName, ScriptPlace
from psserver.core.coordinator.collective_calls import CollectiveRequest
from psserver.core.coordinator.data_requests import BatchRequest
from psserver.core.coordinator.machine import CoordinatorMachine


class UnfitPush(NamedTuple):
    """Why a push is refused.

    reason: reason of its Reject entry.
    detail: explanation for people.
    """

    reason: str
    detail: str


def unfit_pushes(
    coordinator: CoordinatorMachine, news: Iterable[Staged]
) -> dict[PushKey, UnfitPush]:
    """Return the refusals for newly staged pushes of members that must not be applied."""
    unfit = {}
    for staged in news:
        problem, key = push_problem(coordinator, staged), staged.key
        if problem is not None and key.seq > 0 and coordinator.reports.is_undecided(key):
            unfit[key] = problem
    return unfit


def push_problem(coordinator: CoordinatorMachine, staged: Staged) -> UnfitPush | None:
    """Return why a push cannot be applied, or None.

    A base above the job's version is stale: the worker may have pulled from a shard before its
    rollback. The worker returns the batches and computes again from current weights.
    """
    version = coordinator.job.version
    if staged.base > version:
        text = f"computed from version {staged.base}, but the job is at version {version}"
        return UnfitPush("STALE", text)
    problem = ""
    if not staged.square_norm >= 0:
        problem = f"the square of its norm is {staged.square_norm}"
    elif staged.batches:
        problem = batches_problem(coordinator, staged.batches)
    return UnfitPush("INVALID_REQUEST", problem) if problem else None


def batches_problem(coordinator: CoordinatorMachine, batches: Sequence[BatchKey]) -> str:
    """Return why batches of a push or of a return cannot be the job's, or an empty string."""
    loops = coordinator.ledger.loops
    known = ((loops[batch.loop].spec, batch) for batch in batches if batch.loop in loops)
    return next((problem for spec, batch in known if (problem := _batch_problem(spec, batch))), "")


def _batch_problem(spec: Spec, batch: BatchKey) -> str:
    name = f"batch {batch.number} of loop {batch.loop}"
    if isinstance(spec, LoopSpec):
        return (
            ""
            if batch.number < spec.total
            else f"{name} does not exist: the loop has {spec.total} batches"
        )
    if spec.laps == 0:
        return (
            f"{name} does not exist: the loop has {spec.epochs} epochs over {spec.sources} sources"
        )
    if batch.count > spec.batch_size:
        return f"{name} has {batch.count} samples, above the loop's batch_size {spec.batch_size}"
    return ""


def check_memory(spec: ModelSpec, shards: int, usable_nbytes: int) -> None:
    """Raise InvalidRequestError if the weights do not fit into the memory of `shards` servers.

    Args:
        spec: The model.
        shards: Number of servers.
        usable_nbytes: Memory of one server, in bytes.
    """
    needed = sum(tensor.nbytes for tensor in spec.tensors) // shards
    if needed > usable_nbytes:
        need = f"its weights take {needed} bytes on each of {shards} servers"
        refuse("model", f"{need}, which may use {usable_nbytes}", "more servers")


def check_batch_request(coordinator: CoordinatorMachine, request: BatchRequest) -> None:
    """Raise InvalidRequestError if no worker asks for batches in this way."""
    spec, global_batch = request.spec, coordinator.job.rules.global_batch
    check_place(f"data of loop {spec.loop}", request.place)
    if global_batch is not None and global_batch // spec.batch_size > limits.MAX_BATCHES_PER_PUSH:
        batches = global_batch // spec.batch_size
        units = f"--global-batch {global_batch} takes {batches} batches of {spec.batch_size}"
        refuse(
            f"data of loop {spec.loop}",
            f"{units}, above {limits.MAX_BATCHES_PER_PUSH}",
            "a larger batch_size",
        )


def check_place(what: str, place: ScriptPlace | None) -> None:
    """Raise InvalidRequestError if a loader has too long a name."""
    if place is not None:
        name = place.current or PassName("", 0)
        check_names(what, (name.loader, *place.first_open))


def check_returned_batches(coordinator: CoordinatorMachine, batches: Sequence[BatchKey]) -> None:
    """Raise InvalidRequestError if these batches cannot be the job's."""
    if problem := batches_problem(coordinator, batches):
        refuse("returning batches", problem, "return only batches that were received")


def check_value_names(coordinator: CoordinatorMachine, names: Sequence[str]) -> None:
    """Raise InvalidRequestError if names of values are too long or too many."""
    if len(names) > limits.MAX_METRICS:
        refuse(
            "report",
            f"{len(names)} values are above {limits.MAX_METRICS}",
            "fewer values at a time",
        )
    check_names("report", names)
    if len({*coordinator.reported.latest, *names}) > limits.MAX_METRICS:
        refuse(
            "report", f"the job has more than {limits.MAX_METRICS} names of values", "reuse names"
        )


KINDS = ("barrier", "all_reduce", "broadcast")


def check_collective(request: CollectiveRequest) -> None:
    """Raise InvalidRequestError if no worker makes this collective call."""
    given, what = request.contribution, f"collective {request.number}"
    if given.kind not in KINDS or len(given.names) != len(given.values):
        refuse(what, f"it is no {', '.join(KINDS)}", "the methods of psworker's Job")
    check_place(what, request.place)
    if len(given.names) > limits.MAX_COLLECTIVE_VALUES:
        count = f"{len(given.names)} values are above {limits.MAX_COLLECTIVE_VALUES}"
        refuse(what, count, "fewer values; tensors travel with optimizer.step()")
    check_names(what, given.names)
    if (nbytes := len(given.text.encode())) > limits.MAX_BROADCAST_NBYTES:
        size = f"its value has {nbytes} bytes of JSON, above {limits.MAX_BROADCAST_NBYTES}"
        refuse(what, size, "a smaller value, or a file")


def check_names(what: str, names: Iterable[str]) -> None:
    """Raise InvalidRequestError if a name is too long."""
    for name in names:
        if len(name) > limits.MAX_NAME_CHARACTERS:
            text = (
                f"{name[:20]!r}... has {len(name)} characters, above {limits.MAX_NAME_CHARACTERS}"
            )
            refuse(what, text, "a shorter name")


def refuse(what: str, why: str, how: str) -> NoReturn:
    """Raise InvalidRequestError for an argument that is out of range."""
    raise InvalidRequestError(f"{what} refused: {why}. Try: {how}", "OUT_OF_RANGE")
