"""Answers of the servers as tables. Status may come from a newer or an older server: what is not there stays empty."""

from collections.abc import Mapping, Sequence
from typing import Any

from pscommon.core.model import ROLES
from pscommon.core.tape import Plan
from psworker.ctl.output import Table, duration, number, size

Json = Mapping[str, Any]


def status(document: Json) -> list[Table]:
    return [
        Table("", (), [(name, value) for name, value in _summary(document) if value not in (None, "")]),
        servers(document),
        _candidates(document),
        _workers_in_short(document),
        _data(document),
        Table(
            "Metrics",
            (),
            [
                (name, "not finite" if value is None else number(value))
                for name, value in document.get("metrics", {}).items()
            ],
        ),
    ]


def _summary(document: Json) -> list[tuple[str, object]]:
    return [
        ("job", document.get("job")),
        ("state", document.get("state")),
        ("waits for", document.get("waiting_for")),
        ("policy", _policy(document)),
        ("model", _model(document.get("model"))),
        ("version", document.get("version")),
        ("running for", duration(document.get("seconds"))),
        ("steps", document.get("steps")),
        ("samples", document.get("samples")),
        ("pushes", ", ".join(f"{count} {outcome}" for outcome, count in document.get("pushes", {}).items() if count)),
        ("workers done", document.get("finished")),
        ("snapshots", _snapshots(document)),
        ("snapshot problem", document.get("snapshot_problem")),
    ]


def _policy(document: Json) -> str:
    bound = document.get("staleness")
    return f"{document.get('policy')}" + (f", at most {bound} steps apart" if bound is not None else "")


def _model(model: Json | None) -> str:
    if not model:
        return ""
    return (
        f"{model.get('tensors')} tensors, {model.get('parameters')} parameters, {size(model.get('bytes'))}, "
        f"{model.get('optimizer')}"
    )


def _snapshots(document: Json) -> str:
    age, count = document.get("snapshot_age_seconds"), len(document.get("snapshots", ()))
    return f"{count}, the newest {duration(age)} old" if age is not None else str(count or "")


def servers(document: Json) -> Table:
    rows = [
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
        for server in document.get("servers", ())
    ]
    return Table(
        "Servers", ("shard", "address", "up", "version", "weights", "optimizer", "received", "sent", "standby"), rows
    )


def _standby(server: Json) -> str:
    """Where it is, and how far."""
    if not server.get("standby"):
        return ""
    behind = server.get("standby_behind")
    return f"{server['standby']} {server.get('standby_state')}" + (f", {behind} records behind" if behind else "")


def _candidates(document: Json) -> Table:
    """Servers that have come for ps-ctl reshard."""
    rows = [(f"{row.get('shard')}/{row.get('shards')}", row.get("address")) for row in document.get("candidates", ())]
    return Table("Servers that wait for ps-ctl reshard", ("shard", "address"), rows)


def _workers_in_short(document: Json) -> Table:
    """What fits a narrow terminal; `ps-ctl workers` has the rest."""
    rows = [
        (
            worker.get("worker"),
            f"{worker.get('host')}:{worker.get('pid')}",
            worker.get("device"),
            worker["health"] if worker.get("health") in ("slow", "silent") else worker.get("state"),
            worker.get("steps"),
            number(worker.get("samples_per_second")),
            worker.get("phase"),
            _why(worker),
        )
        for worker in document.get("workers", ())
    ]
    return Table("Workers", ("worker", "host:pid", "device", "state", "steps", "samples/s", "phase", "reason"), rows)


def _why(worker: Json) -> str:
    """Why it is out, or soon will be."""
    return str(worker.get("reason") or ("asked to leave" if worker.get("draining") else ""))


def workers(document: Json) -> Table:
    rows = [
        (
            worker.get("worker"),
            worker.get("rank"),
            f"{worker.get('host')}:{worker.get('pid')}",
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
            _why(worker),
        )
        for worker in document.get("workers", ())
    ]
    headings = (
        "worker", "rank", "host:pid", "device", "state", "health", "clock", "steps",
        "step", "own part", "samples/s", "phase", "silent", "reason",
    )  # fmt: skip
    return Table("Workers", headings, rows)


def _data(document: Json) -> Table:
    rows = [
        (
            loop.get("loop"),
            loop.get("size"),
            loop.get("batch_size"),
            f"{loop.get('epoch')} of {loop.get('epochs')}",
            f"{loop.get('committed')} of {loop.get('total')}",
            loop.get("leased"),
        )
        for loop in document.get("data", ())
    ]
    return Table("Data", ("loop", "samples", "batch size", "epochs done", "batches done", "handed out"), rows)


def snapshots(rows: Sequence[Json]) -> Table:
    headings = ("version", "bytes", "age", "state", "path")
    cells = [(r["version"], size(r.get("nbytes")), duration(r.get("seconds")), r["state"], r["path"]) for r in rows]
    return Table("", headings, cells)


def plan_document(plan: Plan, addresses: Sequence[str]) -> dict[str, Any]:
    """Placement as JSON: for each shard its ranges of the tape by role, for each tensor where it lies."""
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
        "tensors": [_placed(plan, index) for index in range(len(plan.spec.tensors))],
    }


def _placed(plan: Plan, index: int) -> dict[str, Any]:
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
        "shards": [shard for shard, span in ranges if max(start, span.start) < min(stop, span.stop)],
    }


def plan(document: Json) -> list[Table]:
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
        (t["name"], f"{t['dtype']}{t['shape']}", t["role"], size(t["bytes"]), ", ".join(map(str, t["shards"])))
        for t in document["tensors"]
    ]
    return [
        Table("Shards", ("shard", "address", "bytes", *ROLES), shards),
        Table("Tensors", ("name", "type", "role", "bytes", "on shards"), tensors),
    ]
