"""A push is received in order or as pieces in any order, into its staging buffer."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.parameters.partition import WorkerBuffer
from pscommon.wire.frames import encode_data, encode_header
from psproto.v1 import parameter_server_pb2 as pb
from psserver.exchange.handlers import UnaryIO
from psserver.exchange.push_receiver import Coverage, OpenPushReceiver
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore
from psserver.waiting import run
from tests.support.stores import SGD, begun, model, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = model(
    ((64,), "float32"),
    ((32,), "float32"),
    ((48,), "float32"),
    ((16,), "float32", "buffer"),
    optimizer=SGD,
)
"""Gradients of 256, 128 and 192 bytes, then 64 bytes of buffers; no padding."""
LENGTH = 640
VALUES = torch.arange(160, dtype=torch.float32)
WIRE = VALUES.numpy().tobytes()


@pytest.fixture
def store() -> ParameterStore:
    return begun(SPEC).stores[0]


@pytest.fixture
def staging(store: ParameterStore) -> Staging:
    """Return a staging buffer that held NaN before."""
    staging = store.allocate_staging()
    for view in staging.views:
        view[:] = b"\xff" * len(view)
    return staging


def content(staging: Staging) -> bytes:
    return b"".join(staging.views)


def piece(start: int, stop: int, wire: bytes = WIRE) -> bytes:
    """Return the frame with these bytes of the push."""
    return encode_data(memoryview(wire)[start:stop], offset=start)


def pieces(*spans: tuple[int, int]) -> list[bytes]:
    return [piece(start, stop) for start, stop in spans if start < stop]


def close(absent: Sequence[int] = ()) -> bytes:
    return encode_header(pb.PushPullHeader(samples=3, absent=absent))


def opened(staging: Staging, *frames: bytes) -> pb.PushPullHeader:
    """Begin a push with a header alone, and close it after these frames."""
    return received(staging, *frames, close())


def received(staging: Staging, *frames: bytes) -> pb.PushPullHeader:
    return receive_open(staging, encode_header(pb.PushPullHeader(open=True)), *frames)


def receive_open(staging: Staging, *frames: bytes) -> pb.PushPullHeader:
    """Receive an open push of which these are all frames; return its closing header."""
    io, receiver, closing = UnaryIO(iter(frames), None), OpenPushReceiver(staging), None
    while closing is None:
        closing = run(io.receive_piece(receiver))
    receiver.close(closing.absent)
    return closing


def receive(staging: Staging, *frames: bytes) -> None:
    """Receive a push in order: its header, and these frames."""
    header = encode_header(pb.PushPullHeader())
    run(UnaryIO(iter((header, *frames)), None).receive(staging.views, staging.mark_filled))


# ---- in any order --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_pieces_may_come_in_any_order_and_size(staging: Staging, seed: int) -> None:
    chance = random.Random(seed)
    cuts = sorted({0, LENGTH, *(chance.randrange(LENGTH) for _ in range(chance.randrange(12)))})
    parts = [piece(*span) for span in itertools.pairwise(cuts)]
    chance.shuffle(parts)

    assert opened(staging, *parts).samples == 3
    assert content(staging) == WIRE


@pytest.mark.parametrize("seed", range(20))
def test_the_last_copy_of_repeated_bytes_counts(staging: Staging, seed: int) -> None:
    chance, expected = random.Random(seed), bytearray(WIRE)
    frames = [piece(0, LENGTH)]
    for _ in range(8):
        start, stop = sorted(chance.sample(range(LENGTH + 1), 2))
        new = chance.randbytes(LENGTH)
        expected[start:stop] = new[start:stop]
        frames.append(piece(start, stop, new))
    opened(staging, *frames)

    assert content(staging) == bytes(expected)


def test_the_opening_header_may_carry_bytes(staging: Staging) -> None:
    first = pb.ExchangeRequest(
        header=pb.PushPullHeader(open=True), offset=40, data=WIRE[40:200]
    ).SerializeToString()
    receive_open(staging, first, piece(200, LENGTH), piece(0, 40), close())

    assert content(staging) == WIRE


def test_the_closing_header_may_carry_the_last_bytes(staging: Staging) -> None:
    """An open push is a protobuf message of any layout: the offset may come last."""
    last = pb.ExchangeRequest(
        header=pb.PushPullHeader(samples=5), offset=600, data=WIRE[600:]
    ).SerializeToString()

    assert received(staging, piece(0, 600), last).samples == 5
    assert content(staging) == WIRE


@pytest.mark.parametrize(
    ("came", "missing"),
    [
        ([], "0 to 576"),
        ([(0, 575), (576, 640)], "0 to 576"),
        ([(4, 640)], "0 to 576"),
        ([(0, 300), (301, 640)], "0 to 576"),
        ([(0, 576)], "576 to 640"),
        ([(0, 639)], "576 to 640"),
        ([(0, 576), (576, 600), (604, 640)], "576 to 640"),
    ],
)
def test_missing_bytes_are_named(
    staging: Staging, came: list[tuple[int, int]], missing: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"without bytes {missing}"):
        opened(staging, *pieces(*came))


@pytest.mark.parametrize(
    ("absent", "without"),
    [
        ([0], (0, 256)),
        ([1], (256, 384)),
        ([2], (384, 576)),
        ([0, 2], (384, 576)),
        ([1, 2], (256, 576)),
    ],
)
def test_only_absent_tensors_may_be_missing(
    store: ParameterStore, absent: list[int], without: tuple[int, int]
) -> None:
    start, stop = without
    spare, short = store.allocate_staging(), store.allocate_staging()
    received(spare, *pieces((0, start), (stop, LENGTH)), close(absent))

    assert spare.absent == frozenset(absent)
    assert content(spare)[:start] + content(spare)[stop:] == WIRE[:start] + WIRE[stop:]
    with pytest.raises(InvalidRequestError, match="without bytes"):
        received(short, *pieces((0, start), (stop + 4, LENGTH)), close(absent))


def test_a_sent_tensor_may_be_declared_absent_later(store: ParameterStore) -> None:
    """NaN in it is ignored then, and its weights do not change."""
    job = begun(SPEC)
    store, before = job.stores[0], job.weights()
    staging = store.allocate_staging()
    poisoned = WIRE[:256] + torch.full((32,), math.nan).numpy().tobytes() + WIRE[384:]
    received(staging, piece(0, LENGTH, poisoned), close([1]))
    assert store.find_non_finite(staging) == ""
    store.apply([staging], [1])
    after = job.weights()

    assert torch.equal(after["t1"], before["t1"])
    assert torch.equal(after["t0"], before["t0"] - VALUES[:64])
    assert torch.equal(after["t2"], before["t2"] - VALUES[96:144])


def test_an_open_push_is_checked_completely(store: ParameterStore) -> None:
    staging = store.allocate_staging()
    bad = bytearray(WIRE)
    bad[256:260] = b"\x00\x00\xc0\x7f"
    opened(staging, piece(300, LENGTH, bytes(bad)), piece(0, 300, bytes(bad)))

    assert store.find_non_finite(staging) == "t1"


@pytest.mark.parametrize(
    ("start", "length"), [(0, 641), (636, 8), (640, 4), (1 << 40, 4), (576, 65)]
)
def test_more_bytes_than_the_model_has_are_refused(
    staging: Staging, start: int, length: int
) -> None:
    with pytest.raises(InvalidRequestError, match="bytes more than the model"):
        opened(staging, encode_data(memoryview(bytes(length)), offset=start))


def test_an_open_push_must_be_closed(staging: Staging) -> None:
    with pytest.raises(InvalidRequestError, match="ended without the header that closes it"):
        received(staging, piece(0, LENGTH))


def test_many_small_pieces_are_merged_into_few_ranges() -> None:
    covered = Coverage()
    for start in [*range(0, 2000, 4), *range(2, 2000, 4)]:
        covered.add(start, start + 2)

    assert covered.missing([(0, 2000)]) is None
    assert covered.missing([(1990, 2001)]) == (1990, 2001)
    assert covered.missing([(7, 7)]) is None


@pytest.mark.parametrize("absent", [[3], [7], [0, 4_000_000_000]])
def test_only_tensors_with_a_gradient_can_be_absent(staging: Staging, absent: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="is not a trainable tensor"):
        received(staging, piece(0, LENGTH), close(absent))


def test_an_opening_header_cannot_declare_absent_tensors(store: ParameterStore) -> None:
    """Its offsets would have another meaning."""
    in_buffer = store.stage_worker_buffer(WorkerBuffer(torch.zeros(LENGTH, dtype=torch.uint8)), [])
    for staging in (store.allocate_staging([1]), in_buffer):
        with pytest.raises(InvalidRequestError, match="names absent tensors at its end"):
            opened(staging, piece(0, LENGTH))


# ---- in order ------------------------------------------------------------------------------------


def in_frames(wire: bytes, size: int) -> list[bytes]:
    """Return frames of this size."""
    return [
        encode_data(memoryview(wire)[start : start + size]) for start in range(0, len(wire), size)
    ]


@pytest.mark.parametrize("size", [1, 3, 64, 257, 639, 640])
def test_frames_of_any_size_are_received_in_order(staging: Staging, size: int) -> None:
    receive(staging, *in_frames(WIRE, size))

    assert content(staging) == WIRE
    assert staging.gradients_are_finite


@pytest.mark.parametrize(
    ("wire", "message"), [(WIRE[:-1], "1 bytes early"), (WIRE + b"x", "1 bytes more")]
)
def test_the_length_must_match(staging: Staging, wire: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        receive(staging, *in_frames(wire, 100))


def test_a_second_header_is_refused(staging: Staging) -> None:
    with pytest.raises(InvalidRequestError, match="a second header"):
        receive(staging, close())
