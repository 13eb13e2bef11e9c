"""Values of the core as proto messages and back. What comes from the wire is checked here: bad
values are refused.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import loop_problem
from pscommon.core.log_entries import (
    Apply,
    BatchKey,
    Begin,
    Contribution,
    Cut,
    Entry,
    Evict,
    Measure,
    Measured,
    PushKey,
    Reject,
    Reshard,
    SetBuffers,
    ShardReport,
    Staged,
)
from pscommon.core.model_spec import (
    InvalidModelError,
    ModelSpec,
    Role,
    TensorSpec,
    Treatment,
    optimizers_from_json,
)
from pscommon.core.script_place import PassName, ScriptPlace
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import model_pb2 as mo
from psproto.v1 import parameter_server_pb2 as ps

ROLE_TO_PROTO: "Mapping[Role, mo.Role.ValueType]" = {
    "trainable": mo.ROLE_TRAINABLE,
    "buffer": mo.ROLE_BUFFER,
    "frozen": mo.ROLE_FROZEN,
}
ROLE_FROM_PROTO: Mapping[int, Role] = {number: role for role, number in ROLE_TO_PROTO.items()}

TREATMENT_TO_PROTO: "Mapping[Treatment | None, mo.Treatment.ValueType]" = {
    None: mo.TREATMENT_UNSPECIFIED,
    "average": mo.TREATMENT_AVERAGE,
    "first": mo.TREATMENT_FIRST,
}
TREATMENT_FROM_PROTO: Mapping[int, Treatment | None] = {
    number: treatment for treatment, number in TREATMENT_TO_PROTO.items()
}


def model_to_proto(spec: ModelSpec) -> mo.ModelSpec:
    tensors = [
        mo.TensorSpec(
            name=t.name,
            shape=t.shape,
            dtype=t.dtype,
            role=ROLE_TO_PROTO[t.role],
            group=t.group,
            aliases=t.aliases,
            treatment=TREATMENT_TO_PROTO[t.treatment],
        )
        for t in spec.tensors
    ]
    return mo.ModelSpec(tensors=tensors, optimizer_json=spec.optimizer_json())


def model_from_proto(message: mo.ModelSpec) -> ModelSpec:
    """Parse a model.

    Raises:
        InvalidRequestError: the model cannot be trained.
    """
    try:
        optimizer = optimizers_from_json(json.loads(message.optimizer_json))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"optimizer_json is no optimizer: {error!r}") from error
    try:
        return ModelSpec(tuple(map(_tensor_from_proto, message.tensors)), optimizer)
    except InvalidModelError as error:
        raise InvalidRequestError(str(error)) from error


def _tensor_from_proto(tensor: mo.TensorSpec) -> TensorSpec:
    role = ROLE_FROM_PROTO.get(tensor.role)
    if role is None:
        raise InvalidRequestError(f"tensor {tensor.name!r}: unknown role {tensor.role}")
    if tensor.treatment not in TREATMENT_FROM_PROTO:
        raise InvalidRequestError(f"tensor {tensor.name!r}: unknown treatment {tensor.treatment}")
    return TensorSpec(
        tensor.name,
        tuple(tensor.shape),
        tensor.dtype,
        role,
        tensor.group,
        tuple(tensor.aliases),
        TREATMENT_FROM_PROTO[tensor.treatment],
    )


def batches_to_proto(batches: Iterable[BatchKey]) -> list[ps.Batch]:
    return [ps.Batch(loop=b.loop, number=b.number, count=b.count, end=b.end) for b in batches]


def batches_from_proto(messages: Iterable[ps.Batch]) -> tuple[BatchKey, ...]:
    return tuple(BatchKey(m.loop, m.number, m.count, m.end) for m in messages)


def loop_to_proto(spec: Spec) -> co.LoopSpec:
    return co.LoopSpec(**spec.as_dict())


def loop_from_proto(message: co.LoopSpec) -> Spec:
    """InvalidRequestError for numbers that make no loop, or one that no ledger can deal."""
    try:
        spec = _spec_from_proto(message)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if problem := loop_problem(spec):
        raise InvalidRequestError(
            f"loop {spec.loop} refused: {problem}. Try: fewer epochs", "OUT_OF_RANGE"
        )
    return spec


def _spec_from_proto(message: co.LoopSpec) -> Spec:
    if message.sources:
        return StreamSpec(message.loop, message.sources, message.batch_size, message.epochs)
    return LoopSpec(
        message.loop,
        message.size,
        message.batch_size,
        message.epochs,
        message.drop_last,
        message.shuffle,
        message.seed,
        message.first_epoch,
        message.order,
        message.sampler,
        message.batches,
    )


def place_to_proto(place: ScriptPlace) -> co.ScriptPlace:
    loader, number = place.current or ("", 0)
    return co.ScriptPlace(
        loader=loader,
        pass_number=number,
        first_open=place.first_open,
        first_loader=place.first_loader,
        training_passes=place.training_passes,
    )


def place_fields(place: ScriptPlace | int) -> dict[str, Any]:
    """Return the fields of a request that say where a script is.

    place: The place, or the first numbered loop that the worker has not left.
    """
    return {"first_open": place} if isinstance(place, int) else {"place": place_to_proto(place)}


def place_from_proto(message: co.ScriptPlace) -> ScriptPlace:
    return ScriptPlace(
        PassName(message.loader, message.pass_number) if message.loader else None,
        dict(message.first_open),
        message.first_loader,
        message.training_passes,
    )


def key_to_proto(key: PushKey) -> co.PushKey:
    return co.PushKey(worker=key.worker, seq=key.seq)


def key_from_proto(message: co.PushKey) -> PushKey:
    return PushKey(message.worker, message.seq)


def staged_to_proto(staged: Staged) -> co.Staged:
    return co.Staged(
        key=key_to_proto(staged.key),
        samples=staged.samples,
        base=staged.base,
        batches=batches_to_proto(staged.batches),
        problem=staged.problem,
        square_norm=staged.square_norm,
        mended=staged.mended,
        optimizer=staged.optimizer,
        reduce_round=staged.reduce_round,
        upload=staged.upload,
    )


def staged_from_proto(message: co.Staged) -> Staged:
    return Staged(
        key_from_proto(message.key),
        message.samples,
        message.base,
        batches_from_proto(message.batches),
        message.problem,
        message.square_norm,
        message.mended,
        message.optimizer,
        message.reduce_round,
        message.upload,
    )


def report_to_proto(report: ShardReport) -> co.Report:
    """The shard's number travels beside it, in LinkShardRequest."""
    return co.Report(
        epoch=report.log_id,
        index=report.index,
        staged=map(staged_to_proto, report.staged),
        log_bytes=report.log_bytes,
        digest=report.digest,
        log_broken=report.log_broken,
        moving=report.is_resharding,
        measured=co.Measured(**report.measured._asdict()) if report.measured else None,
    )


def report_from_proto(shard: int, message: co.Report) -> ShardReport:
    staged = tuple(map(staged_from_proto, message.staged))
    measured = (
        Measured(message.measured.index, message.measured.square_norm)
        if message.HasField("measured")
        else None
    )
    return ShardReport(
        shard,
        message.epoch,
        message.index,
        staged,
        message.log_bytes,
        message.digest,
        message.log_broken,
        message.moving,
        measured,
    )


def entry_to_proto(entry: Entry) -> co.Entry:
    body: dict[str, Any]
    match entry:
        case Begin():
            body = {"begin": co.Begin(worker=entry.worker)}
        case Apply():
            contributions = _contributions_to_proto(entry.contributions)
            body = {"apply": co.Apply(version=entry.version, contributions=contributions)}
        case Measure():
            contributions = _contributions_to_proto(entry.contributions)
            body = {"measure": co.Measure(contributions=contributions)}
        case SetBuffers():
            body = {"set_buffers": co.SetBuffers(key=key_to_proto(entry.key))}
        case Reject():
            key = key_to_proto(entry.key)
            body = {"reject": co.Reject(key=key, reason=entry.reason, detail=entry.detail)}
        case Evict():
            body = {"evict": co.Evict(worker=entry.worker, reason=entry.reason)}
        case Cut():
            body = {"cut": co.Cut(version=entry.version)}
        case Reshard():
            body = {"reshard": co.Reshard(version=entry.version, shards=entry.shards)}
    return co.Entry(index=entry.index, **body)


def _contributions_to_proto(contributions: Iterable[Contribution]) -> list[co.Contribution]:
    return [
        co.Contribution(
            key=key_to_proto(part.key),
            samples=part.samples,
            base=part.base,
            scale=None if part.scale == 1.0 else part.scale,
        )
        for part in contributions
    ]


def _contributions_from_proto(messages: Iterable[co.Contribution]) -> tuple[Contribution, ...]:
    return tuple(
        Contribution(
            key_from_proto(part.key),
            part.samples,
            part.base,
            part.scale if part.HasField("scale") else 1.0,
        )
        for part in messages
    )


def entry_from_proto(message: co.Entry) -> Entry:
    """InvalidRequestError for an entry of a kind that this version does not know."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError(f"log entry {message.index} is of an unknown kind")
    return _ENTRIES[kind](message.index, getattr(message, kind))


_ENTRIES: Mapping[str, Callable[[int, Any], Entry]] = {
    "begin": lambda index, body: Begin(index, body.worker),
    "apply": lambda index, body: Apply(
        index, body.version, _contributions_from_proto(body.contributions)
    ),
    "measure": lambda index, body: Measure(index, _contributions_from_proto(body.contributions)),
    "set_buffers": lambda index, body: SetBuffers(index, key_from_proto(body.key)),
    "reject": lambda index, body: Reject(index, key_from_proto(body.key), body.reason, body.detail),
    "evict": lambda index, body: Evict(index, body.worker, body.reason),
    "cut": lambda index, body: Cut(index, body.version),
    "reshard": lambda index, body: Reshard(index, body.version, body.shards),
}
