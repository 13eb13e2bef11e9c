"""Values survive the wire byte for byte, and invalid ones are refused."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.errors import InvalidRequestError
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
    SetBuffers,
    ShardReport,
    Staged,
)
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire import messages as codec
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import model_pb2 as mo

complete = st.integers(0, 2**64 - 1)
keys = st.builds(PushKey, complete, complete)
small = st.integers(0, 2**32 - 1)
signed = st.integers(-(2**63), 2**63 - 1)
batches = st.builds(BatchKey, small, complete, small, st.booleans())
staged = st.builds(
    Staged,
    keys,
    complete,
    complete,
    st.lists(batches).map(tuple),
    st.text(),
    optimizer=st.text(),
)
scales = st.floats(0.0, 1.0)
contributions = st.lists(st.builds(Contribution, keys, complete, complete, scales)).map(tuple)
entries = st.one_of(
    st.builds(Begin, complete, complete),
    st.builds(Apply, complete, complete, contributions),
    st.builds(Reject, complete, keys, st.text(), st.text()),
    st.builds(Evict, complete, complete, st.text()),
    st.builds(Cut, complete, complete),
    st.builds(Measure, complete, contributions),
    st.builds(SetBuffers, complete, keys),
)

SPEC = ModelSpec(
    (
        TensorSpec("w", (3, 4), "float32", aliases=("head.w",)),
        TensorSpec("scale", (), "bfloat16", group=1),
        TensorSpec("mean", (0,), "float64", "buffer"),
        TensorSpec("variance", (1,), "float64", "buffer", treatment="average"),
        TensorSpec("queue", (1,), "float64", "buffer", treatment="first"),
        TensorSpec("mask", (2,), "bool", "frozen"),
    ),
    OptimizerSettings(
        "adam",
        ({"lr": 1e-3, "betas": (0.9, 0.999), "amsgrad": False}, {"lr": 0.1, "maximize": None}),
    ),
)


@given(entries)
def test_an_entry_survives_the_wire(entry: Entry) -> None:
    assert codec.entry_from_proto(_again(codec.entry_to_proto(entry))) == entry


@given(
    st.lists(staged).map(tuple),
    signed,
    complete,
    st.none() | st.builds(Measured, complete, st.floats(0.0, allow_infinity=True)),
)
def test_a_report_survives_the_wire(
    pushes: tuple[Staged, ...], log_id: int, index: int, measured: Measured | None
) -> None:
    report = ShardReport(2, log_id, index, pushes, measured=measured)

    message = co.Report.FromString(codec.report_to_proto(report).SerializeToString())

    assert codec.report_from_proto(2, message) == report


@pytest.mark.parametrize(
    "spec",
    [
        LoopSpec(
            3, 2**40, 64, epochs=5, drop_last=True, shuffle=False, seed=-(2**62), first_epoch=7
        ),
        StreamSpec(3, sources=1000, batch_size=64, epochs=5),
        LoopSpec(3, 20, 7, shuffle=False, order="0f" * 16, sampler="Mine", batches=4),
    ],
)
def test_a_loop_survives_the_wire_with_every_field(spec: Spec) -> None:
    assert (
        codec.loop_from_proto(co.LoopSpec.FromString(codec.loop_to_proto(spec).SerializeToString()))
        == spec
    )


def test_an_invalid_loop_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="batch_size"):
        codec.loop_from_proto(co.LoopSpec(size=10))
    with pytest.raises(InvalidRequestError, match="batch_size"):
        codec.loop_from_proto(co.LoopSpec(sources=10))
    with pytest.raises(InvalidRequestError, match="digest of 32 hexadecimal digits"):
        codec.loop_from_proto(
            co.LoopSpec(size=10, batch_size=1, epochs=1, order="0" * 10**6, sampler="Mine")
        )


def test_a_batch_of_a_map_style_loop_has_the_size_of_its_two_numbers() -> None:
    (message,) = codec.batches_to_proto([BatchKey(3, 100)])

    assert message.SerializeToString() == bytes([1 << 3, 3, 2 << 3, 100])


def test_every_kind_of_entry_has_a_message() -> None:
    kinds = {field.name for field in co.Entry.DESCRIPTOR.oneofs_by_name["kind"].fields}

    assert {kind.replace("_", "") for kind in kinds} == {
        kind.__name__.lower() for kind in get_args(Entry)
    }


def test_an_unknown_entry_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="log entry 9"):
        codec.entry_from_proto(co.Entry(index=9))


def test_a_model_survives_the_wire() -> None:
    message = mo.ModelSpec.FromString(codec.model_to_proto(SPEC).SerializeToString())

    read = codec.model_from_proto(message)
    assert read == SPEC
    assert [tensor.aliases for tensor in read.tensors] == [
        tensor.aliases for tensor in SPEC.tensors
    ]


def test_the_clip_norm_is_sent_with_the_optimizer() -> None:
    spec = replace(SPEC, optimizer=replace(SPEC.optimizer, clip_norm=0.5))

    assert codec.model_from_proto(codec.model_to_proto(spec)) == spec
    assert "clip_norm" not in codec.model_to_proto(SPEC).optimizer_json


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.ClearField("tensors"), "at least one tensor"),
        (lambda m: m.tensors.add().CopyFrom(m.tensors[0]), "'w' is listed twice"),
        (lambda m: setattr(m.tensors[0], "dtype", "object"), "dtype object"),
        (lambda m: setattr(m.tensors[0], "role", mo.ROLE_UNSPECIFIED), "'w': unknown role"),
        (lambda m: setattr(m.tensors[0], "treatment", 9), "'w': unknown treatment 9"),
        (lambda m: m.tensors[0].shape.append(-1), "negative shape"),
        (lambda m: setattr(m.tensors[0], "group", 5), "group 5 of 2"),
        (lambda m: setattr(m, "optimizer_json", ""), "no optimizer"),
        (lambda m: setattr(m, "optimizer_json", "[1]"), "no optimizer"),
        (lambda m: setattr(m, "optimizer_json", '{"name": "sgd", "groups": [3]}'), "no optimizer"),
        (
            lambda m: setattr(
                m, "optimizer_json", '{"name": "sgd", "groups": [{}], "clip_norm": -1}'
            ),
            "clip_norm is -1",
        ),
        (
            lambda m: setattr(
                m, "optimizer_json", '{"name": "sgd", "groups": [{}], "clip_norm": "1"}'
            ),
            "clip_norm is '1'",
        ),
    ],
)
def test_an_invalid_model_is_refused(change, words: str) -> None:  # type: ignore[no-untyped-def]
    message = codec.model_to_proto(SPEC)
    change(message)

    with pytest.raises(InvalidRequestError, match=words):
        codec.model_from_proto(message)


def _again(message: co.Entry) -> co.Entry:
    return co.Entry.FromString(message.SerializeToString())
