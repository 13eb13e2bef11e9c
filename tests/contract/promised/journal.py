"""Commands as logs contain them: one job with each command and argument."""

from typing import Any

LOG_ID = 7

MODEL = {
    "tensors": [
        {"name": "w", "shape": [2, 3], "dtype": "float32", "role": "trainable", "group": 0}
    ],
    "optimizer": {"name": "sgd", "groups": [{"lr": 0.1}], "clip_norm": 1.0},
}
RULES = {
    "policy": {"name": "sync", "bound": 0, "barrier": True, "max_staleness": None, "backup": 0},
    "min_workers": 2,
    "lease": 5.0,
    "every": {"seconds": None, "steps": None},
    "on_loss": {"mode": "shrink", "seconds": 0.0},
    "late": "return",
    "bad_gradients": "skip",
    "max_norm": None,
    "quarantine_after": None,
    "global_batch": None,
    "progress_timeout": 60.0,
}
LOOP = {
    "loop": 0,
    "size": 40,
    "batch_size": 4,
    "epochs": 1,
    "drop_last": False,
    "shuffle": True,
    "seed": 3,
    "first_epoch": 0,
}
SAMPLED = {
    **LOOP,
    "loop": 1,
    "order": "0123456789abcdef0123456789abcdef",
    "sampler": "SubsetRandomSampler",
    "batches": 10,
}
STREAM = {"loop": 2, "sources": 3, "batch_size": 4, "epochs": 1}


PLACE = [["test", 0], {"train": 1}, 2, 1]
"""The place of a script: the pass, first passes by loader, first loader, training passes."""


def join(rank: int | None) -> dict[str, Any]:
    return {"do": "join", "rank": rank, "host": "machine", "pid": 1, "device": "cpu", "attempt": 0}


def next_batches(worker: int, spec: dict[str, Any]) -> dict[str, Any]:
    asked = {"worker": worker, "received": 0, "count": 1, "idle": True, "first_open": spec["loop"]}
    return {"do": "next_batches", "spec": spec, **asked}


def staged(worker: int, seq: int, number: int | None = None, *optimizer: str) -> list[Any]:
    """Return a staged push.

    Parts: worker, seq, samples, base, batches, problem, squared norm, repaired tensor, and the name
    of the optimizer in a job of several.
    """
    batches = [] if number is None else [[0, number, 0, False]]
    return [worker, seq, 4, 0, batches, "", 2.0 * (seq > 0), "", *optimizer]


def report(shard: int, index: int, *rest: Any) -> dict[str, Any]:
    """Return a report. rest: staged pushes, and the answer to a Measure if any."""
    return {"do": "report", "report": [shard, LOG_ID, index, *rest]}


COMMANDS: list[dict[str, Any]] = [
    {"do": "go_by", "rules": RULES},
    join(0),
    join(1),
    {**join(None), "training": "fold-1"},
    *[{"do": "follows", "shard": shard} for shard in (0, 1)],
    *[{"do": "register", "worker": worker, "spec": MODEL} for worker in (1, 2)],
    *[report(shard, 0, [staged(1, 0)]) for shard in (0, 1)],
    *[{"do": "register", "worker": worker, "spec": MODEL, "seed": 7} for worker in (1, 2)],
    *[next_batches(worker, LOOP) for worker in (1, 2)],
    {"do": "report_values", "worker": 1, "values": [["loss", 0.5, 0, 1000.0]]},
    {"do": "report_metrics", "worker": 1, "metrics": {"accuracy": 0.25}},
    *[report(shard, 1, [staged(1, 1, 0), staged(2, 1, 1)]) for shard in (0, 1)],
    *[report(shard, 2, [], [2, 2.0]) for shard in (0, 1)],
    {"do": "refuse_push", "worker": 1, "seq": 2, "reason": "OUT_OF_RANGE", "detail": "too large"},
    {"do": "return_batches", "worker": 1, "batches": [[0, 0, 0, False]]},
    {"do": "return_batches", "worker": 1, "batches": [[0, 9, 0, False]], "used": True},
    next_batches(1, SAMPLED),
    next_batches(1, STREAM),
    {**next_batches(1, {**LOOP, "size": 6}), "first_open": None, "place": PLACE},
    {"do": "set_policy", "row": ["sync", None, None, 0]},
    {"do": "want_workers", "workers": 3, "reason": "ps-ctl scale"},
    {"do": "drain", "worker": 2},
    {"do": "missing", "worker": 2},
    {"do": "back", "worker": 2},
    {"do": "cut"},
    {"do": "part", "shard": 0, "part": [1, 4, "shard-0-of-2", 10, "sha256", ""]},
    {"do": "part", "shard": 1, "part": [1, 4, "shard-1-of-2", 10, "sha256", ""]},
    {"do": "filed"},
    {"do": "advance"},
    {"do": "shard_lost", "shard": 1},
    {"do": "reborn", "shard": 1},
    {"do": "reshard", "shards": 3, "keeps": False},
    *[{"do": "moved", "shard": shard} for shard in (0, 1, 2)],
    {
        "do": "reduce",
        "worker": 1,
        "number": 1,
        "version": 0,
        "samples": 4,
        "address": "host:1",
        "groups_json": "",
        "is_partial": False,
        "completed": 0,
    },
    {
        "do": "collective",
        "worker": 1,
        "number": 1,
        "contribution": ["all_reduce", ["loss"], [0.5], 4, "null"],
        "first_open": 0,
    },
    {
        "do": "collective",
        "worker": 1,
        "number": 1,
        "contribution": ["barrier", [], [], 1, "null"],
        "first_open": 0,
        "place": [None, *PLACE[1:]],
    },
    {"do": "settle"},
    {"do": "lose", "worker": 2, "reason": "its lease ended"},
    {"do": "leave", "worker": 3, "reason": ""},
    {"do": "forget_departed", "keep": 0},
    {"do": "recovered", "generation": 1, "resumes": True},
]

SEVERAL_OPTIMIZERS = {
    "tensors": [
        {"name": f"{name}.w", "shape": [2], "dtype": "float32", "role": "trainable", "group": group}
        for group, name in enumerate("dg")
    ],
    "optimizer": [[name, MODEL["optimizer"]] for name in "dg"],
}
SEVERAL_OPTIMIZERS_COMMANDS: list[dict[str, Any]] = [
    {"do": "go_by", "rules": RULES | {"min_workers": 4}},
    *[join(rank) for rank in range(4)],
    *[{"do": "follows", "shard": shard} for shard in (0, 1)],
    *[
        {"do": "register", "worker": worker, "spec": SEVERAL_OPTIMIZERS, "seed": 2**64 - worker}
        for worker in (1, 2, 3, 4)
    ],
    *[report(shard, 0, [staged(1, 0)]) for shard in (0, 1)],
    *[
        {"do": "register", "worker": worker, "spec": SEVERAL_OPTIMIZERS, "seed": 2**64 - worker}
        for worker in (1, 2, 3, 4)
    ],
    *[
        report(shard, 1, [staged(worker, 1, None, "dg"[worker % 2]) for worker in (1, 2, 3, 4)])
        for shard in (0, 1)
    ],
    *[report(shard, 2, [], [2, 2.0]) for shard in (0, 1)],
    *[report(shard, 3, [], [3, 2.0]) for shard in (0, 1)],
]
"""A round with pushes of two optimizers; both updates are measured."""
