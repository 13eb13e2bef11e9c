"""The description of a model: what is refused, and how two of them differ."""

import json
from dataclasses import replace
from typing import Any

import pytest

from pscommon.core.model_spec import (
    InvalidModelError,
    ModelSpec,
    OptimizerSettings,
    TensorSpec,
    freeze,
    model_from_json,
    model_to_json,
)

SGD = OptimizerSettings("sgd", ({"lr": 0.1}, {"lr": 0.2}))
TENSORS = (TensorSpec("w", (4, 3), "float32"), TensorSpec("b", (4,), "float32", group=1))
MODEL = ModelSpec((*TENSORS, TensorSpec("mean", (4,), "float32", "buffer")), SGD)
ADAM = OptimizerSettings("adam", ({"lr": 0.3},), 0.5)
SEVERAL = ModelSpec((*TENSORS, TensorSpec("d.w", (2,), "float32", group=2)), {"g": ADAM, "a": SGD})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "complex64"}, "dtype complex64 is not one of"),
        ({"dtype": "int64"}, "int64 cannot be trained"),
        ({"shape": (4, -1)}, "negative shape"),
        ({"group": 2}, "group 2 of 2"),
        ({"role": "other"}, "role 'other'"),
        ({"name": "b"}, "'b' is listed twice"),
        ({"aliases": ("b",)}, "'b' is listed twice"),
        ({"aliases": ("w",)}, "'w' is listed twice"),
        ({"aliases": ("v", "v")}, "'v' is listed twice"),
    ],
)
def test_a_model_that_no_server_can_train_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        ModelSpec((replace(TENSORS[0], **changed), TENSORS[1]), SGD)


def test_a_model_without_tensors_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="at least one tensor"):
        ModelSpec((), SGD)


def test_sizes_are_computed() -> None:
    assert [(t.size, t.nbytes) for t in MODEL.tensors] == [(12, 48), (4, 16), (4, 16)]
    assert (
        TensorSpec("scalar", (), "bfloat16").nbytes,
        TensorSpec("none", (3, 0), "float64").nbytes,
    ) == (2, 0)


def test_aliases_are_no_difference_and_only_encoded_if_present() -> None:
    tied = replace(MODEL, tensors=(replace(MODEL.tensors[0], aliases=("v",)), *MODEL.tensors[1:]))

    assert tied.differences(MODEL) == []
    assert tied.fingerprint() == MODEL.fingerprint()
    assert all("aliases" not in tensor for tensor in model_to_json(MODEL)["tensors"])
    read = model_from_json(json.loads(json.dumps(model_to_json(tied))))
    assert [tensor.aliases for tensor in read.tensors] == [("v",), (), ()]


def test_the_order_of_tensors_is_not_a_difference() -> None:
    other = ModelSpec(MODEL.tensors[::-1], SGD)

    assert other.differences(MODEL) == []
    assert other.fingerprint() == MODEL.fingerprint()


CHANGED = {
    "b: float32[5] trainable, the job has float32[4] trainable; group 0, the job has 1": (
        TENSORS[0],
        TensorSpec("b", (5,), "float32"),
        MODEL.tensors[2],
    ),
    "b: missing; the job has float32[4] trainable": (TENSORS[0], MODEL.tensors[2]),
    "x: not in the job's model": (*MODEL.tensors, TensorSpec("x", (), "float32")),
    "mean: float32[4] frozen, the job has float32[4] buffer": (
        *TENSORS,
        replace(MODEL.tensors[2], role="frozen"),
    ),
    "w: float64[4, 3] trainable, the job has float32[4, 3] trainable": (
        replace(TENSORS[0], dtype="float64"),
        TENSORS[1],
        MODEL.tensors[2],
    ),
}


@pytest.mark.parametrize("line", CHANGED)
def test_differences_are_reported_by_tensor(line: str) -> None:
    other = ModelSpec(CHANGED[line], SGD)

    assert other.differences(MODEL) == [line]
    assert other.fingerprint() != MODEL.fingerprint()


OPTIMIZERS = {
    "optimizer: adam, the job has sgd": OptimizerSettings("adam", SGD.groups),
    "optimizer: 3 parameter groups, the job has 2": OptimizerSettings("sgd", (*SGD.groups, {})),
    "optimizer: clip_norm=1.0, the job has None": replace(SGD, clip_norm=1),
    "optimizer group 1: lr=0.3, the job has 0.2": OptimizerSettings(
        "sgd", (SGD.groups[0], {"lr": 0.3})
    ),
}


@pytest.mark.parametrize("line", OPTIMIZERS)
def test_optimizers_are_compared_too(line: str) -> None:
    assert replace(MODEL, optimizer=OPTIMIZERS[line]).differences(MODEL) == [line]


def test_an_optimizer_survives_json_bit_by_bit() -> None:
    spec = OptimizerSettings("adam", ({"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "amsgrad": False},))

    assert OptimizerSettings.from_dict(spec.as_dict()) == spec
    assert freeze({"betas": [0.9, 0.99]}) == {"betas": (0.9, 0.99)}


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_a_clip_norm_is_a_finite_number_above_0(clip_norm: Any) -> None:
    with pytest.raises(InvalidModelError, match=r"clip_norm is .*, not a finite number above 0"):
        replace(SGD, clip_norm=clip_norm)


def test_a_model_without_a_clip_norm_has_its_original_json() -> None:
    clipped = replace(MODEL, optimizer=replace(SGD, clip_norm=0.5))

    assert model_to_json(MODEL)["optimizer"] == {
        "name": "sgd",
        "groups": [{"lr": 0.1}, {"lr": 0.2}],
    }
    assert MODEL.optimizer_json() == '{"groups": [{"lr": 0.1}, {"lr": 0.2}], "name": "sgd"}'
    assert model_from_json(json.loads(json.dumps(model_to_json(clipped)))) == clipped
    assert clipped.fingerprint() != MODEL.fingerprint()


# ---- several optimizers


def test_several_optimizers_survive_json_in_the_order_of_their_names() -> None:
    raw = json.loads(json.dumps(model_to_json(SEVERAL)))

    assert raw["optimizer"] == [
        ["a", {"name": "sgd", "groups": [{"lr": 0.1}, {"lr": 0.2}]}],
        ["g", {"name": "adam", "groups": [{"lr": 0.3}], "clip_norm": 0.5}],
    ]
    assert model_from_json(raw) == SEVERAL
    assert list(SEVERAL.optimizers) == ["a", "g"]
    assert SEVERAL.fingerprint() == replace(SEVERAL, optimizer={"a": SGD, "g": ADAM}).fingerprint()
    assert SEVERAL.fingerprint() != replace(SEVERAL, optimizer={"a": SGD, "h": ADAM}).fingerprint()


@pytest.mark.parametrize(
    "optimizer", [[], [["", {"name": "sgd", "groups": [{}] * 3}]], [[3, {}]], [["a", 3]], 3, [3]]
)
def test_a_list_that_names_no_optimizers_is_refused(optimizer: Any) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        model_from_json(model_to_json(SEVERAL) | {"optimizer": optimizer})


def test_each_optimizer_has_its_own_groups_and_tensors() -> None:
    assert SEVERAL.groups == ({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3})
    assert SEVERAL.group_ranges() == {"a": range(2), "g": range(2, 3)}
    assert SEVERAL.trainable_of() == {"a": {0, 1}, "g": {2}}
    assert SEVERAL.parts() == {
        "a": (SGD, list(TENSORS)),
        "g": (ADAM, [TensorSpec("d.w", (2,), "float32")]),
    }
    assert MODEL.parts() == {"": (SGD, list(TENSORS))}


def test_differences_name_the_optimizer() -> None:
    changed = replace(SEVERAL, optimizer={"a": SGD, "g": replace(ADAM, groups=({"lr": 1.0},))})
    renamed = replace(SEVERAL, optimizer={"a": SGD, "h": ADAM})

    assert changed.differences(SEVERAL) == ["optimizer g group 0: lr=1.0, the job has 0.3"]
    assert renamed.differences(SEVERAL) == ["optimizers: a, h, the job has a, g"]
    assert "optimizers: no name, the job has a, g" in MODEL.differences(SEVERAL)


def with_treatment(treatment: Any) -> ModelSpec:
    return replace(
        MODEL, tensors=(*TENSORS, TensorSpec("mean", (4,), "float32", "buffer", 0, (), treatment))
    )


def test_treatments_are_written_only_if_they_are_set() -> None:
    for treatment in ("average", "first"):
        spec = with_treatment(treatment)
        assert model_to_json(spec)["tensors"][-1]["treatment"] == treatment
        assert model_from_json(model_to_json(spec)) == spec
    assert "treatment" not in model_to_json(MODEL)["tensors"][-1]


def test_a_treatment_that_one_side_leaves_open_is_no_difference() -> None:
    average, first = with_treatment("average"), with_treatment("first")

    assert not average.differences(MODEL)
    assert not MODEL.differences(first)
    assert first.differences(average) == [
        "mean: float32[4] buffer (first), the job has float32[4] buffer (average)"
    ]
    assert len({spec.fingerprint() for spec in (MODEL, average, first)}) == 3


@pytest.mark.parametrize(
    "tensor",
    [
        TensorSpec("n", (), "int64", "buffer", treatment="first"),
        TensorSpec("w", (2,), "float32", treatment="first"),
        TensorSpec("f", (2,), "float32", "frozen", treatment="average"),
        TensorSpec("m", (2,), "float32", "buffer", treatment="last"),  # type: ignore[arg-type]
    ],
    ids=["integer", "trainable", "frozen", "unknown"],
)
def test_only_floating_buffers_have_a_treatment(tensor: TensorSpec) -> None:
    with pytest.raises(InvalidModelError, match="average or first, for a floating buffer"):
        ModelSpec((tensor,), SGD)
