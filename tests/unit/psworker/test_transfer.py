"""The order of bytes on the wire, which proto/ documents."""

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import PartitionPlan
from psworker.exchange.transfer import ShardTransfer, digest_of

PLAN = PartitionPlan(
    ModelSpec(
        (
            TensorSpec("frozen", (64,), "uint8", "frozen"),
            TensorSpec("buffer", (128,), "uint8", "buffer"),
            TensorSpec("a", (64,), "float32"),
            TensorSpec("b", (64,), "float32"),
        ),
        OptimizerSettings("sgd"),
    ),
    shards=2,
)


def buffer(number: int = 0) -> bytearray:
    """Return a flat buffer whose blocks of 64 bytes contain their number."""
    return bytearray(byte + number for block in range(PLAN.nbytes // 64) for byte in [block] * 64)


def blocks(views: list[memoryview]) -> list[int]:
    return list(dict.fromkeys(b"".join(views)))


@pytest.mark.parametrize(
    ("shard", "absent", "everything", "expected"),
    [
        (0, [], False, [0, 1, 2, 3, 8]),
        (1, [], False, [4, 5, 6, 7, 9]),
        (0, [2], False, [8]),
        (1, [2], False, [4, 5, 6, 7, 9]),
        (1, [3, 2], False, [9]),
        (0, [], True, [0, 1, 2, 3, 8]),
        (1, [], True, [4, 5, 6, 7, 9, 10]),
    ],
)
def test_gradients_are_sent_before_buffers_and_buffers_received_before_weights(
    shard: int, absent: list[int], everything: bool, expected: list[int]
) -> None:
    move = ShardTransfer(
        PLAN, memoryview(buffer()), memoryview(buffer()), frozenset(absent), everything
    )
    trainable, buffers, frozen = (
        ([0, 1, 2, 3], [8], []) if shard == 0 else ([4, 5, 6, 7], [9], [10])
    )

    assert blocks(move.sent(shard)) == expected
    assert blocks(move.received(shard)) == [*buffers, *trainable, *(frozen if everything else [])]


def test_a_transfer_without_gradients_or_weights_is_empty() -> None:
    assert ShardTransfer(PLAN, weights=memoryview(buffer())).sent(0) == []
    assert ShardTransfer(PLAN, gradients=memoryview(buffer())).received(0) == []


def test_received_bytes_are_written_to_the_flat_buffer() -> None:
    memory = buffer()
    for view in ShardTransfer(PLAN, weights=memoryview(memory)).received(1):
        view[:] = bytes(len(view))

    assert [memory[block * 64] for block in range(11)] == [0, 1, 2, 3, 0, 0, 0, 0, 8, 0, 10]


def test_the_digest_depends_on_everything_that_is_sent() -> None:
    def digest(
        number: int = 0, absent: frozenset[int] = frozenset(), content: bytes = b""
    ) -> bytes:
        return digest_of(ShardTransfer(PLAN, memoryview(buffer(number)), None, absent), content)

    assert digest() == digest()
    assert len({digest(), digest(1), digest(absent=frozenset([2])), digest(content=b"x")}) == 4


def test_the_digest_is_the_same_for_any_number_of_servers() -> None:
    """Otherwise a push that is repeated after a reshard would count twice."""
    for absent in (frozenset[int](), frozenset({2})):
        moves = [
            ShardTransfer(PartitionPlan(PLAN.spec, shards), memoryview(buffer()), None, absent)
            for shards in (1, 2, 3)
        ]
        assert len({digest_of(move, b"header") for move in moves}) == 1


@pytest.mark.parametrize("index", [-1, 0, 1, 4])
def test_only_trainable_tensors_can_be_absent(index: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"tensor {index} cannot be absent"):
        ShardTransfer(PLAN, memoryview(buffer()), None, frozenset([index]))
