"""The texts of refused requests to the coordinator: WHAT failed: WHY. Try: HOW.

Other tests assert reasons, exit codes and the names of flags. A changed text changes this file.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import PSError
from pscommon.core.log_entries import BatchKey, PushKey, Staged
from pscommon.core.model_spec import ModelSpec, TensorSpec
from pscommon.core.script_place import PassName
from psserver.coordinator.worker_requests import check_tensor_names
from psserver.core.commands.data_commands import ReturnBatches
from psserver.core.commands.request_checks import (
    check_batch_request,
    check_memory,
    check_value_names,
    push_problem,
    wait_seconds,
)
from psserver.core.commands.worker_commands import Join
from psserver.core.coordinator.admission import check_registration
from psserver.core.coordinator.data_requests import BatchRequest
from psserver.core.data.draw_groups import units_of
from psserver.core.data.resume_rules import loop_mismatch, model_mismatch, why_not_extended
from psserver.core.job.policy import policy
from tests.support.coordinator_job import LOOP, MODEL, Job
from tests.support.wording import check_form

DETAIL_CHARACTERS = {"model of a snapshot": 60, "sampler": 120, "loop of a snapshot": 110}
SAMPLER = LoopSpec(0, size=4, batch_size=1, sampler="Mine", order="0" * 32)
WIDE = ModelSpec((TensorSpec("w", (2,), "float32"),), MODEL.optimizer)


def fail(error: PSError | None) -> None:
    assert error is not None
    raise error


def described(text: str) -> None:
    """Raise a text that is part of messages and of the status."""
    assert text
    raise PSError(text)


def refused_push(**changes: Any) -> None:
    job = Job()
    job.ask(1)
    staged = replace(Staged(PushKey(1, 1), 8, 0, ()), **changes)
    problem = push_problem(job.coordinator, staged)
    assert problem is not None
    raise PSError(problem.detail, problem.reason)


def not_extended(last: bool = True, first: bool = True, epochs: int = 2) -> None:
    job = LoopSpec(0, size=4, batch_size=1, epochs=2)
    described(why_not_extended(replace(job, epochs=epochs), job, last, first, is_outstanding=True))


def batches(**changes: Any) -> None:
    check_batch_request(
        Job().coordinator,
        BatchRequest(1, **{"spec": LOOP, "received": 0, "count": 1, "idle": False} | changes),
    )


def returned(loop: Any, *numbers: BatchKey) -> None:
    job = Job()
    job.ask(1, loop=loop)
    ReturnBatches(1, list(numbers)).check(job.coordinator)


def reported(*names: str) -> None:
    check_value_names(Job().coordinator, names)


def large_update() -> None:
    job = Job()
    job.coordinator.job.rules = replace(job.coordinator.job.rules, global_batch=65537)
    check_batch_request(job.coordinator, BatchRequest(1, LOOP, 0, 1, idle=False))


def many_names() -> None:
    job = Job()
    job.coordinator.reported.latest.update({str(name): 0.0 for name in range(1000)})
    check_value_names(job.coordinator, ["one more"])


FAILURES: dict[str, Callable[[], object]] = {
    # the policy and its numbers
    "policy": lambda: policy("hogwild"),
    "missing staleness": lambda: policy("ssp"),
    "staleness": lambda: policy("ssp", -1),
    "backup workers": lambda: policy("async", backup=1),
    "in flight": lambda: check_registration(Job(workers=2).coordinator, 99, 10, 29),
    "stream": lambda: units_of(8, StreamSpec(0, sources=1, batch_size=2)),
    "batch sampler": lambda: units_of(8, replace(SAMPLER, batches=2)),
    "global batch": lambda: units_of(5, replace(LOOP, batch_size=2)),
    # models and data that differ from those of the job
    "reserved name": lambda: check_tensor_names(
        ModelSpec((TensorSpec("__metadata__", (1,), "float32"),), MODEL.optimizer)
    ),
    "model": lambda: fail(model_mismatch(WIDE, MODEL, "")),
    "model of a snapshot": lambda: fail(model_mismatch(WIDE, MODEL, "the snapshot of version 3")),
    "sampler": lambda: fail(loop_mismatch(SAMPLER, replace(SAMPLER, order="1" * 32), None, "", "")),
    "loop": lambda: fail(loop_mismatch(LOOP, replace(LOOP, size=5), PassName("test", 2), "", "")),
    "loop of a snapshot": lambda: fail(
        loop_mismatch(LOOP, SAMPLER, None, "the snapshot of version 3", "it ended")
    ),
    "fewer epochs": lambda: not_extended(epochs=1),
    "inner loop": lambda: not_extended(last=False),
    "later worker": lambda: not_extended(first=False),
    "outstanding batches": not_extended,
    # requests out of range
    "wait": lambda: wait_seconds(-1),
    "memory": lambda: check_memory(WIDE, 2, 3),
    "batches at a time": lambda: batches(count=0),
    "received": lambda: batches(received=-1),
    "epochs": lambda: batches(spec=replace(LOOP, epochs=2**62)),
    "laps": lambda: batches(spec=StreamSpec(0, sources=2**30, batch_size=1, epochs=2**20)),
    "batches of an update": large_update,
    "rank": lambda: Join(-1, "host", 1, "cpu").check(Job().coordinator),
    "attempt": lambda: Join(0, "host", 1, "cpu", attempt=-1).check(Job().coordinator),
    "name": lambda: Join(0, "h" * 300, 1, "cpu").check(Job().coordinator),
    "values": lambda: reported(*map(str, range(1001))),
    "names of values": many_names,
    "missing batch": lambda: returned(LOOP, BatchKey(0, 4)),
    "missing batch of a stream": lambda: returned(StreamSpec(0, 1, 1), BatchKey(0, -1)),
    "samples of a batch": lambda: returned(StreamSpec(0, 1, 1), BatchKey(0, 0, 2)),
    "batches of a return": lambda: returned(LOOP, *[BatchKey(0, 0)] * 65537),
    # pushes
    "newer push": lambda: refused_push(base=1),
    "samples": lambda: refused_push(samples=-1),
    "norm": lambda: refused_push(square_norm=float("nan")),
}
TEXTS: dict[str, str] = {
    "policy": "policy 'hogwild' is not valid. Try: one of sync, ssp, async",
    "missing staleness": (
        "policy ssp and staleness None do not fit: ssp requires a staleness, other policies "
        "exclude it. Try: `--policy ssp --staleness S`"
    ),
    "staleness": "--staleness -1 is not valid. Try: at least 0 (0 acts as sync)",
    "backup workers": (
        "policy async excludes `--backup-workers 1`: only a sync round waits for all workers. "
        "Try: policy sync"
    ),
    "in flight": (
        "--in-flight 29 is too small: a round of 3 workers has 30 bytes in flight on a server. "
        "Try: `--in-flight 30`, more servers, or fewer workers"
    ),
    "stream": (
        "--global-batch 8 cannot apply to a stream, whose length is not known. Try: start the "
        "servers without it"
    ),
    "batch sampler": (
        "--global-batch 8 cannot apply to a batch_sampler, whose batches may differ in size. "
        "Try: sampler= with batch_size="
    ),
    "global batch": (
        "--global-batch 5 is not a multiple of the script's batch_size 2: an update takes "
        "whole batches. Try: a batch_size that divides it, or another `--global-batch`"
    ),
    "reserved name": (
        "cannot register the model: a tensor is named __metadata__, which safetensors files "
        "reserve. Try: rename this parameter or buffer"
    ),
    "model": (
        "this worker's model is not the job's:\n  w: float32[2] trainable, the job has "
        "float32[1] trainable\nTry: start all workers with the same script and the same "
        "arguments"
    ),
    "model of a snapshot": (
        "this worker's model is not that of the snapshot of version 3:\n  w: float32[2] "
        "trainable, the job has float32[1] trainable\nTry: run the script that wrote it, start "
        "over with `--resume never` (snapshots are moved aside), or choose another `--data-dir`"
    ),
    "sampler": (
        "the sampler Mine gave another order in loop 1 than in the job: order is "
        "00000000000000000000000000000000 here and 11111111111111111111111111111111 there. "
        "Try: a sampler whose order depends only on data that all workers share and on the "
        "global generators of torch, numpy and random, which are seeded by (seed, pass)"
    ),
    "loop": (
        "pass 3 of loader 'test' of this script is not that of the job: size is 4 here and 5 "
        "there. Try: the same job.batches calls on all workers, or name= each; for a pass of one "
        "worker torch's DataLoader"
    ),
    "loop of a snapshot": (
        "loop 1 of this script is not that of the snapshot of version 3: order is missing here "
        "and 00000000000000000000000000000000 there; sampler is missing here and Mine there; "
        "it ended. Try: run the unchanged script, start over with `--resume never` (snapshots "
        "are moved aside), or choose another `--data-dir`"
    ),
    "fewer epochs": "a resumed job cannot have fewer epochs than the 2 it was started with",
    "inner loop": ("only the last loop of a job can get more epochs, and this job has a later one"),
    "later worker": (
        "only the first worker after a resume can raise the epochs; this is a later worker"
    ),
    "outstanding batches": (
        "workers of the previous run hold batches of this stream, so its epochs cannot be "
        "raised yet"
    ),
    "wait": (
        "waiting refused: wait_ms -1 is not between 0 and 86400000. Try: ask again later instead"
    ),
    "memory": (
        "model refused: its weights take 4 bytes on each of 2 servers, which may use 3. Try: "
        "more servers"
    ),
    "batches at a time": (
        "data refused: count 0 is not between 1 and 1024. Try: ask for fewer batches at a time"
    ),
    "received": ("data refused: -1 batches cannot have been received. Try: send their number"),
    "epochs": (
        "data of loop 0 refused: 4611686018427387904 epochs of 4 batches are above "
        "9223372036854775807. Try: a smaller number of epochs"
    ),
    "laps": (
        "data of loop 0 refused: 1073741824 sources x 1048576 epochs are above 17592186044416. "
        "Try: a smaller number of epochs"
    ),
    "batches of an update": (
        "data of loop 0 refused: --global-batch 65537 takes 65537 batches of 1, above 65536. "
        "Try: a larger batch_size"
    ),
    "rank": (
        "join refused: rank -1 is not between 0 and 1000000. Try: set PS_WORKER_RANK to a "
        "smaller number"
    ),
    "attempt": (
        "join refused: attempt -1 is not between 0 and 1000000. Try: unset PS_WORKER_ATTEMPT"
    ),
    "name": (
        "join refused: 'hhhhhhhhhhhhhhhhhhhh'... has 300 characters, above 256. Try: a shorter name"
    ),
    "values": ("report refused: 1001 values are above 1000. Try: fewer values at a time"),
    "names of values": (
        "report refused: the job has more than 1000 names of values. Try: reuse names"
    ),
    "missing batch": (
        "returning batches refused: batch 4 of loop 0 does not exist: the loop has 4 batches. "
        "Try: return only batches that were received"
    ),
    "missing batch of a stream": (
        "returning batches refused: batch -1 of loop 0 does not exist: the loop has 1 epochs "
        "over 1 sources. Try: return only batches that were received"
    ),
    "samples of a batch": (
        "returning batches refused: batch 0 of loop 0 has 2 samples, above the loop's "
        "batch_size 1. Try: return only batches that were received"
    ),
    "batches of a return": (
        "returning batches refused: it names 65537 batches, above 65536. Try: return only "
        "batches that were received"
    ),
    "newer push": "computed from version 1, but the job is at version 0",
    "samples": "samples=-1 is not between 0 and 281474976710656",
    "norm": "the square of its norm is nan",
}


def text_of(name: str) -> str:
    with pytest.raises((PSError, ValueError)) as caught:
        FAILURES[name]()
    return str(caught.value)


@pytest.mark.parametrize("name", FAILURES)
def test_text(name: str) -> None:
    assert text_of(name) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_at_most_one_remedy_and_is_short(name: str) -> None:
    check_form(TEXTS[name], DETAIL_CHARACTERS.get(name, 0))
