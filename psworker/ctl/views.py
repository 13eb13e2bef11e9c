"""Tables for the answers of the servers.

The status may come from a newer or an older server; missing values stay empty.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pscommon.core.model_spec import ROLES
from pscommon.core.partition import PartitionPlan
from psworker.ctl.output import Table, duration, number, size
from psworker.ctl.pass_text import pass_text

Json = Mapping[str, Any]


def status(document: Json) -> list[Table]:
    """Return the tables of `ps-ctl status`."""
    return [
        Table(
            "", (), [(name, value) for name, value in _summary(document) if value not in (None, "")]
        ),
        servers(document),
        _candidates(document),
        _short_workers(document),
        _data(document),
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


def _summary(document: Json) -> list[tuple[str, object]]:
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
        ("version", document.get("version")),
        ("running for", duration(document.get("seconds"))),
        ("steps", document.get("steps")),
        ("samples", document.get("samples")),
        (
            "pushes",
            _list(
                *(f"{n} {outcome}" for outcome, n in (document.get("pushes") or {}).items() if n)
            ),
        ),
        ("workers done", document.get("finished")),
        ("snapshots", _snapshots(document)),
        ("snapshot problem", document.get("snapshot_problem")),
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
    cells = [
        (
            server.get("shard"),
            server.get("address"),
            server.get("connected"),
            server.get("version"),
            size(server.get("parameter_bytes")),
            size(server.get("state_bytes")),
            size(server.get("received_bytes")),
            size(server.get("sent_bytes")),
            _standby(server),
        )
        for server in rows(document, "servers")
    ]
    return Table(
        "Servers",
        (
            "shard",
            "address",
            "up",
            "version",
            "weights",
            "optimizer",
            "received",
            "sent",
            "standby",
        ),
        cells,
    )


def _standby(server: Json) -> str:
    """Return address, state and lag of the standby."""
    if not server.get("standby"):
        return ""
    where = f"{server['standby']} {server.get('standby_state') or ''}".rstrip()
    return _list(where, _text("{} records behind", server.get("standby_behind") or None))


def _candidates(document: Json) -> Table:
    """Return the servers that wait for `ps-ctl reshard`."""
    cells = [
        (_text("{}/{}", row.get("shard"), row.get("shards")), row.get("address"))
        for row in rows(document, "candidates")
    ]
    return Table("Servers waiting for ps-ctl reshard", ("shard", "address"), cells)


def _short_workers(document: Json) -> Table:
    """Return the workers in a table for narrow terminals; `ps-ctl workers` shows all columns."""
    cells = [
        (
            worker.get("worker"),
            _text("{}:{}", worker.get("host"), worker.get("pid")),
            worker.get("device"),
            worker["health"]
            if worker.get("health") in ("slow", "hanging", "silent")
            else worker.get("state"),
            worker.get("steps"),
            number(worker.get("samples_per_second")),
            worker.get("phase"),
            _reason(worker),
        )
        for worker in rows(document, "workers")
    ]
    return Table(
        "Workers",
        ("worker", "host:pid", "device", "state", "steps", "samples/s", "phase", "reason"),
        cells,
    )


def _reason(worker: Json) -> str:
    """Return the reason why the worker left or will leave."""
    if worker.get("health") == "hanging":
        return f"no call from its script for {duration(worker.get('no_call_seconds'))}"
    return str(worker.get("reason") or ("asked to leave" if worker.get("draining") else ""))


def workers(document: Json) -> Table:
    """Return the table of all workers with all columns."""
    cells = [
        (
            worker.get("worker"),
            worker.get("rank"),
            _text("{}:{}", worker.get("host"), worker.get("pid")),
            worker.get("device"),
            worker.get("state"),
            worker.get("health"),
            worker.get("clock"),
            worker.get("steps"),
            duration(worker.get("step_seconds")),
            duration(worker.get("own_seconds")),
            number(worker.get("samples_per_second")),
            worker.get("phase"),
            duration(worker.get("silent_seconds")),
            _reason(worker),
        )
        for worker in rows(document, "workers")
    ]
    headings = (
        "worker",
        "rank",
        "host:pid",
        "device",
        "state",
        "health",
        "clock",
        "steps",
        "step",
        "own part",
        "samples/s",
        "phase",
        "silent",
        "reason",
    )
    return Table("Workers", headings, cells)


def _data(document: Json) -> Table:
    cells = [
        (
            loop.get("loop"),
            loop.get("size"),
            loop.get("batch_size"),
            _text("{} of {}", loop.get("epoch"), loop.get("epochs")),
            _text("{} of {}", loop.get("committed"), loop.get("total")),
            loop.get("leased"),
        )
        for loop in rows(document, "data")
    ]
    return Table(
        "Data",
        ("loop", "samples", "batch size", "epochs done", "batches done", "handed out"),
        cells,
    )


def snapshots(listed: Sequence[Json]) -> Table:
    """Return the table of snapshots."""
    headings = ("version", "bytes", "age", "state", "path")
    cells = [
        (
            row.get("version"),
            size(row.get("nbytes")),
            duration(row.get("seconds")),
            row.get("state"),
            row.get("path"),
        )
        for row in listed
    ]
    return Table("", headings, cells)


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
