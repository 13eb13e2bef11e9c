"""The order in which a loop deals the samples of each epoch."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscommon.core.data_loop import LoopSpec

SPECS = st.builds(
    LoopSpec,
    loop=st.integers(0, 3),
    size=st.integers(0, 60),
    batch_size=st.integers(1, 20),
    epochs=st.integers(0, 3),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
    first_epoch=st.integers(0, 3),
)


@given(SPECS)
def test_every_epoch_deals_each_sample_once(spec: LoopSpec) -> None:
    for epoch in range(spec.epochs):
        numbers = range(epoch * spec.batches_in_epoch, (epoch + 1) * spec.batches_in_epoch)
        handed_out = [i for number in numbers for i in spec.indices(number).tolist()]
        restored = spec.size - spec.size % spec.batch_size if spec.drop_last else spec.size

        assert len(handed_out) == restored
        assert len(set(handed_out)) == restored
        assert set(handed_out) <= set(range(spec.size))


@given(SPECS)
def test_total_is_the_number_of_batches(spec: LoopSpec) -> None:
    for number in range(spec.total):
        size = len(spec.indices(number))
        assert 1 <= size <= spec.batch_size
        assert size == spec.batch_size or not spec.drop_last
    with pytest.raises(IndexError):
        spec.indices(spec.total)


@given(SPECS)
def test_a_loop_is_restored_from_a_dict(spec: LoopSpec) -> None:
    assert LoopSpec(**spec.as_dict()) == spec


def test_the_shuffle_never_changes() -> None:
    """Literal numbers: a restarted job continues in its order, with any numpy on any machine."""
    spec = LoopSpec(0, size=10, batch_size=5, epochs=2, seed=7)

    assert [spec.indices(n).tolist() for n in range(4)] == [
        [4, 5, 9, 8, 1],
        [7, 6, 0, 2, 3],
        [8, 6, 9, 5, 0],
        [7, 3, 4, 1, 2],
    ]


def test_epochs_and_seeds_shuffle_differently() -> None:
    spec = LoopSpec(0, size=100, batch_size=100, epochs=2, seed=0)
    other = LoopSpec(0, size=100, batch_size=100, epochs=2, seed=1)

    orders = {tuple(s.indices(n)) for s in (spec, other) for n in range(2)}

    assert len(orders) == 4


def test_single_epochs_equal_the_epochs_of_one_call() -> None:
    stored = LoopSpec(0, size=20, batch_size=10, epochs=3, seed=5)
    parts = [LoopSpec(e, size=20, batch_size=10, epochs=1, seed=5, first_epoch=e) for e in range(3)]

    assert [stored.indices(n).tolist() for n in range(6)] == [
        p.indices(n).tolist() for p in parts for n in range(2)
    ]


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    spec = LoopSpec(0, size=5, batch_size=2, epochs=2, shuffle=False)

    assert [spec.indices(n).tolist() for n in range(6)] == [[0, 1], [2, 3], [4]] * 2


def test_indices_are_int64_and_read_only() -> None:
    indices = LoopSpec(0, size=5, batch_size=5).indices(0)

    assert indices.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        indices[0] = 3


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"size": -1}, {"epochs": -1}, {"first_epoch": -1}, {"loop": -1}]
)
def test_invalid_loops_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"batch_size|negative"):
        LoopSpec(**{"loop": 0, "size": 5, "batch_size": 2} | wrong)


DIGEST = "0123456789abcdef" * 2
SAMPLED: dict[str, Any] = {
    "loop": 0,
    "size": 5,
    "batch_size": 2,
    "shuffle": False,
    "order": DIGEST,
    "sampler": "Mine",
}


def test_a_loop_without_a_sampler_has_its_original_fields() -> None:
    """The format of logs and snapshots does not change."""
    assert list(LoopSpec(0, 5, 2).as_dict()) == [
        "loop",
        "size",
        "batch_size",
        "epochs",
        "drop_last",
        "shuffle",
        "seed",
        "first_epoch",
    ]


@pytest.mark.parametrize(("batches", "total"), [(0, 3), (4, 4)])
def test_a_loop_with_a_sampler_is_stored_completely(batches: int, total: int) -> None:
    spec = LoopSpec(**SAMPLED, batches=batches)

    assert LoopSpec(**spec.as_dict()) == spec
    assert spec.total == spec.batches_in_epoch == total
    with pytest.raises(IndexError, match="known to its sampler, Mine, alone"):
        spec.indices(0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"order": "0" * 31}, "digest of 32 hexadecimal digits"),
        ({"order": "x" * 32}, "digest of 32 hexadecimal digits"),
        ({"order": ""}, "digest of 32 hexadecimal digits"),
        ({"sampler": ""}, "1 to 100 characters, not 0"),
        ({"sampler": "s" * 101}, "1 to 100 characters, not 101"),
        ({"epochs": 2}, "one epoch"),
        ({"batches": 6}, "at least one sample"),
        ({"batches": -1}, "at least one sample"),
        ({"order": "", "sampler": "", "batches": 3}, "digest of 32"),
    ],
)
def test_an_invalid_sampler_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoopSpec(**SAMPLED | wrong)
