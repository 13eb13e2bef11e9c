"""Tables for the answers of the servers.

The status may come from a newer or an older server; missing values stay empty.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pscommon.core.model_spec import ROLES
from pscommon.core.partition import PartitionPlan
from psworker.ctl.output import Table, duration, goodput_text, number, pass_text, size

Json = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Json], object]]
"""By heading, the key of a row's value, or a function of the row."""


def status(document: Json) -> list[Table]:
    """Return the tables of `ps-ctl status`."""
    return [
        Table(
            "", (), [(name, value) for name, value in summary(document) if value not in (None, "")]
        ),
        servers(document),
        _candidates(document),
        _short_workers(document),
        table_of("Data", rows(document, "data"), LOOPS),
        _metrics(document),
    ]


def rows(document: Json, name: str) -> Sequence[Json]:
    """Return the list with this name; empty if missing."""
    return document.get(name) or ()


def _text(form: str, *values: object) -> str:
    """Format the values; return an empty text if one is missing."""
    return "" if None in values else form.format(*values)


def _list(*texts: str) -> str:
    return ", ".join(text for text in texts if text)


def _joined(form: str, *keys: str) -> Callable[[Json], object]:
    return lambda row: _text(form, *map(row.get, keys))


def _shown(form: Callable[[Any], str], key: str) -> Callable[[Json], object]:
    return lambda row: form(row.get(key))


def chosen(columns: Columns, *names: str) -> Columns:
    """Return these columns."""
    return {name: columns[name] for name in names}


def table_of(title: str, listed: Sequence[Json], columns: Columns) -> Table:
    """Return the table of these rows."""
    cells = [
        [row.get(cell) if isinstance(cell, str) else cell(row) for cell in columns.values()]
        for row in listed
    ]
    return Table(title, tuple(columns), cells)


def summary(document: Json) -> list[tuple[str, object]]:
    """Return names and values of the job; a value that is not known is empty or None."""
    return [
        ("job", document.get("job")),
        ("training", _training(document)),
        ("state", document.get("state")),
        ("waits for", document.get("waiting_for")),
        ("policy", _policy(document)),
        ("model", _model(document.get("model"))),
        ("progress", pass_text(document.get("progress"))),
        ("loss", _loss(document)),
        ("samples/s", number((document.get("progress") or {}).get("samples_per_second") or None)),
        ("learning rate", learning_rates(document)),
        ("gradient norm", gradient_norms(document)),
        ("version", document.get("version")),
        ("running for", duration(document.get("seconds"))),
        ("steps", document.get("steps")),
        ("samples", document.get("samples")),
        ("goodput", goodput_text(document.get("goodput"))),
        (
            "pushes",
            _list(
                *(f"{n} {outcome}" for outcome, n in (document.get("pushes") or {}).items() if n)
            ),
        ),
        ("workers done", document.get("finished")),
        ("workers wanted", document.get("workers_wanted")),
        ("snapshots", _snapshots(document)),
        ("snapshot problem", document.get("snapshot_problem")),
        ("page", document.get("page")),
    ]


def _training(document: Json) -> str:
    """Return the name and number of the training; empty for the first one."""
    number = len(document.get("trainings_finished") or ()) + 1
    return _text("{}, number {}", document.get("training"), number) if number > 1 else ""


def _loss(document: Json) -> str:
    """Return the last reported loss; "not finite" for NaN."""
    metrics: Json = document.get("metrics") or {}
    if "loss" not in metrics:
        return ""
    return "not finite" if metrics["loss"] is None else number(metrics["loss"])


def learning_rates(document: Json) -> str:
    """Return the learning rates of each optimizer's parameter groups, each rate once."""

    def text(row: Json) -> str:
        return _list(*dict.fromkeys(number(rate) for rate in row.get("learning_rates") or ()))

    return _of_optimizers(document, text)


def gradient_norms(document: Json) -> str:
    """Return the norm of each optimizer's newest update, where the job computes it."""
    return _of_optimizers(document, lambda row: number(row.get("gradient_norm")))


def _of_optimizers(document: Json, text: Callable[[Json], str]) -> str:
    """Return the texts with the names of the optimizers if there are several."""
    found = ((row.get("optimizer"), text(row)) for row in rows(document, "optimizers"))
    return _list(*(f"{name}: {shown}" if name and shown else shown for name, shown in found))


def _policy(document: Json) -> str:
    return _list(
        _text("{}", document.get("policy")),
        _text("at most {} steps apart", document.get("staleness")),
    )


def _model(model: Json | None) -> str:
    if not model:
        return ""
    return _list(
        _text("{} tensors", model.get("tensors")),
        _text("{} parameters", model.get("parameters")),
        size(model.get("bytes")),
        _text("{}", model.get("optimizer")),
    )


def _snapshots(document: Json) -> str:
    return _list(
        str(len(rows(document, "snapshots")) or ""),
        _text("the newest {} old", duration(document.get("snapshot_age_seconds")) or None),
    )


def _metrics(document: Json) -> Table:
    metrics: Json = document.get("metrics") or {}
    return Table(
        "Metrics",
        (),
        [(name, "not finite" if v is None else number(v)) for name, v in metrics.items()],
    )


def servers(document: Json) -> Table:
    """Return the table of all shards."""
    return table_of("Servers", rows(document, "servers"), SERVERS)


def _standby(server: Json) -> str:
    """Return address, state and lag of the standby."""
    if not server.get("standby"):
        return ""
    where = f"{server['standby']} {server.get('standby_state') or ''}".rstrip()
    return _list(where, _text("{} records behind", server.get("standby_behind") or None))


def _candidates(document: Json) -> Table:
    """Return the servers that wait for `ps-ctl reshard`."""
    columns: Columns = {"shard": _joined("{}/{}", "shard", "shards"), "address": "address"}
    return table_of("Servers waiting for ps-ctl reshard", rows(document, "candidates"), columns)


def _short_workers(document: Json) -> Table:
    """Return the workers in a table for narrow terminals; `ps-ctl workers` shows all columns."""
    columns: Columns = {**chosen(WORKERS, *SHORT), "state": _state}
    return table_of("Workers", rows(document, "workers"), columns)


def _state(worker: Json) -> object:
    noted = worker.get("health") in ("slow", "hanging", "silent")
    return worker["health"] if noted else worker.get("state")


def _reason(worker: Json) -> str:
    """Return the reason why the worker left or will leave."""
    if worker.get("health") == "hanging":
        return f"no call from its script for {duration(worker.get('no_call_seconds'))}"
    return str(worker.get("reason") or ("asked to leave" if worker.get("draining") else ""))


def workers(document: Json) -> Table:
    """Return the table of all workers with all columns."""
    return table_of("Workers", rows(document, "workers"), WORKERS)


def snapshots(listed: Sequence[Json]) -> Table:
    """Return the table of snapshots."""
    return table_of("", listed, SNAPSHOTS)


def _largest_phases(row: Json) -> str:
    """Return where most of a worker's or shard's time went: "compute 71%, wait 20%"."""
    found = row.get("phase_seconds") or {}
    seconds = {phase: value for phase, value in found.items() if value is not None}
    total = sum(seconds.values())
    largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:2]
    return ", ".join(f"{phase} {seconds[phase] / total:.0%}" for phase in largest if total)


SERVERS: Columns = {
    "shard": "shard",
    "address": "address",
    "up": "connected",
    "version": "version",
    "weights": _shown(size, "parameter_bytes"),
    "optimizer": _shown(size, "state_bytes"),
    "received": _shown(size, "received_bytes"),
    "sent": _shown(size, "sent_bytes"),
    "phases": _largest_phases,
    "standby": _standby,
}


WORKERS: Columns = {
    "worker": "worker",
    "rank": "rank",
    "host:pid": _joined("{}:{}", "host", "pid"),
    "device": "device",
    "state": "state",
    "health": "health",
    "clock": "clock",
    "steps": "steps",
    "step": _shown(duration, "step_seconds"),
    "own part": _shown(duration, "own_seconds"),
    "samples/s": _shown(number, "samples_per_second"),
    "phase": "phase",
    "phases": _largest_phases,
    "staleness": "staleness",
    "silent": _shown(duration, "silent_seconds"),
    "reason": _reason,
}

SHORT = ("worker", "host:pid", "device", "state", "steps", "samples/s", "phase", "reason")
"""Columns of WORKERS in the status."""

LOOPS: Columns = {
    "loop": "loop",
    "samples": "size",
    "batch size": "batch_size",
    "epochs done": _joined("{} of {}", "epoch", "epochs"),
    "batches done": _joined("{} of {}", "committed", "total"),
    "handed out": "leased",
}

SNAPSHOTS: Columns = {
    "version": "version",
    "bytes": _shown(size, "nbytes"),
    "age": _shown(duration, "seconds"),
    "state": "state",
    "path": "path",
}


def plan_document(plan: PartitionPlan, addresses: Sequence[str]) -> dict[str, Any]:
    """Return the placement as JSON: flat buffer ranges of each shard, shards of each tensor."""
    return {
        "plan_digest": plan.digest,
        "bytes": plan.nbytes,
        "shards": [
            {
                "shard": shard,
                "address": addresses[shard] if shard < len(addresses) else "",
                "bytes": plan.shard_nbytes(shard),
                "ranges": {role: list(plan.range(shard, role)) for role in ROLES},
            }
            for shard in range(plan.shards)
        ],
        "tensors": [_tensor_document(plan, index) for index in range(len(plan.spec.tensors))],
    }


def _tensor_document(plan: PartitionPlan, index: int) -> dict[str, Any]:
    tensor, (start, stop) = plan.spec.tensors[index], plan.extent(index)
    ranges = ((shard, plan.range(shard, tensor.role)) for shard in range(plan.shards))
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "role": tensor.role,
        "group": tensor.group,
        "bytes": tensor.nbytes,
        "start": start,
        "shards": [
            shard for shard, span in ranges if max(start, span.start) < min(stop, span.stop)
        ],
    }


def plan(document: Json) -> list[Table]:
    """Return the tables of `ps-ctl plan`."""
    shards = [
        (
            row["shard"],
            row["address"],
            size(row["bytes"]),
            *(size(stop - start) for start, stop in row["ranges"].values()),
        )
        for row in document["shards"]
    ]
    tensors = [
        (
            t["name"],
            f"{t['dtype']}{t['shape']}",
            t["role"],
            size(t["bytes"]),
            ", ".join(map(str, t["shards"])),
        )
        for t in document["tensors"]
    ]
    return [
        Table("Shards", ("shard", "address", "bytes", *ROLES), shards),
        Table("Tensors", ("name", "type", "role", "bytes", "on shards"), tensors),
    ]
