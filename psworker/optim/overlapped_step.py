"""Steps that begin in backward and end in the next forward.

Gradients leave in buckets during backward, last layers first, and forward waits for new weights
layer by layer (`arrivals`). Nothing of this changes a result: what left early is compared at
step() with what the script has made of it, byte by byte, and goes again where it differs.
Torch's count of changes in place would be cheaper, but is silent about some (GradScaler's
unscaling, `parameter.grad.data.mul_`, writing through numpy).
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress, groupby, repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from pscommon.core.errors import FencedError, PSError
from pscommon.core.partition import ALIGNMENT_BYTES, ByteRange, piece_nbytes
from psworker.core.protocols import JobClient, PushStream
from psworker.core.results import PushResult
from psworker.model.adapter import ModelAdapter
from psworker.model.flat_buffer import CopyEvent
from psworker.optim.step import Push, StepStrategy
from psworker.optim.weight_gates import Enter, Healing, WeightGates

RETENTION_STEP_COUNT = 100
"""Steps for which a bucket stays until step() after its gradients were changed behind its back,
as by clipping.
"""


@dataclass(slots=True)
class GradientBucket:
    """The trainable tensors [first, last) in tape order, which leave together.

    missing: how many of them still lack gradients in this step. sent: which of them had one when
    they left, None: they have not. stays: for so many steps it leaves at step() only.
    """

    first: int
    last: int
    missing: int = 0
    sent: list[bool] | None = None
    stays: int = 0

    @property
    def places(self) -> range:
        return range(self.first, self.last)


class BucketSender:
    """Sends each bucket as soon as backward has made its gradients.

    A parameter is expected to get as many gradients as in the step before: so accumulation over
    several backwards sends once, and a layer that is not used holds up nobody. `begin` opens a
    push. check: told the place of each gradient that comes, raises where it cannot be right.
    """

    def __init__(
        self, bridge: ModelAdapter, begin: Callable[[], PushStream], check: Callable[[int], None]
    ) -> None:
        self._bridge = bridge
        self._begin = begin
        self._check = check
        self._flow: PushStream | None = None
        self._extents = bridge.trainable.extents
        self.buckets = _buckets(self._extents)
        self._bucket_of = [bucket for bucket in reversed(self.buckets) for _ in bucket.places]
        self._expected = [1] * len(self._extents)
        self._leaving: deque[tuple[CopyEvent, list[ByteRange]]] = deque()
        self._renew(self._expected)
        self._hooks = [
            _hook(tensor, self._counter(i)) for i, tensor in enumerate(bridge.trainable.tensors)
        ]

    def _counter(self, place: int) -> Callable[[Tensor], None]:
        bucket = self._bucket_of[place]

        def made(parameter: Tensor) -> None:
            self._check(place)
            self._counts[place] = count = self._counts[place] + 1
            if count == self._expected[place]:
                bucket.missing -= 1
                if not bucket.missing and not bucket.stays:
                    self._leave(bucket)

        return made

    @torch.no_grad()
    def _leave(self, bucket: GradientBucket) -> None:
        grads = self._bridge.grads(bucket.first, bucket.last)
        self._bridge.write(bucket.first, grads)
        bucket.sent = _given(grads)
        spans = self._spans(bucket, grads)
        self._leaving.append((self._bridge.gradients.to_host(spans), spans))
        try:
            self._flow = flow = self._flow or self._begin()
        except FencedError:  # backward is no place to come back from: finish will meet the same
            return
        while self._leaving and self._leaving[0][0].query():
            _send(flow, self._leaving.popleft()[1])

    def finish(self, push: Push) -> tuple[PushStream, PushResult, set[int]]:
        """Sends all that has not left as it is now, and waits for the decision. Returns also who
        had a gradient.
        """
        self._flow = flow = self._flow or self._begin()
        for ready, spans in self._leaving:
            ready.synchronize()
            _send(flow, spans)
        # not before: it waits for all that a GPU has been given to compute, and what has left
        # backward need not
        self._bridge.reattach()
        grads = self._bridge.grads()
        absent, again = self._bridge.absent(grads), self._send_changed(flow, grads)
        self._bridge.changes.step(absent)
        result = flow.finish(
            absent=absent, samples=push.samples, batches=push.batches, groups_json=push.groups_json
        )
        self._learn(again)
        self._flow = None
        return flow, result, set(compress(range(len(grads)), _given(grads)))

    def _send_changed(self, flow: PushStream, grads: list[Tensor | None]) -> list[GradientBucket]:
        """Returns the buckets that had left and have to leave again."""
        changed = self._changed(grads)
        for bucket in changed:
            self._bridge.write(bucket.first, grads[bucket.first : bucket.last])
        self._bridge.write_buffers()
        spans = [
            span
            for bucket in changed
            for span in self._spans(bucket, grads[bucket.first : bucket.last])
        ]
        self._bridge.gradients.to_host([*spans, self._bridge.buffer_range]).synchronize()
        _send(flow, spans)
        return [bucket for bucket in changed if bucket.sent is not None]

    def _changed(self, grads: list[Tensor | None]) -> list[GradientBucket]:
        """Those that have not left with these very bytes."""
        given, slots = _given(grads), self._bridge.trainable.gradients
        left = [
            bucket for bucket in self.buckets if bucket.sent == given[bucket.first : bucket.last]
        ]
        pairs = [
            (place, grad)
            for bucket in left
            for place in bucket.places
            if (grad := grads[place]) is not None
        ]
        same = self._bridge.gradients.are_equal(
            [slots[place] for place, _ in pairs], [grad for _, grad in pairs]
        )
        differ = {place for (place, _), equal in zip(pairs, same, strict=True) if not equal}
        return [
            bucket
            for bucket in self.buckets
            if bucket not in left or not differ.isdisjoint(bucket.places)
        ]

    def _spans(self, bucket: GradientBucket, grads: list[Tensor | None]) -> list[ByteRange]:
        """The fewest stretches of tape that hold the bucket's gradients; the padding between two
        goes along.
        """
        spans, first = [], bucket.first
        for here, run in groupby(_given(grads)):
            last = first + len(list(run))
            if here:
                spans.append(
                    ByteRange(self._extents[first].start, _padded(self._extents[last - 1].stop))
                )
            first = last
        return [span for span in spans if span.nbytes]

    def _learn(self, again: list[GradientBucket]) -> None:
        """What the next step will be like."""
        for bucket in self.buckets:
            bucket.stays = max(0, bucket.stays - 1)
        for bucket in again:
            places = slice(bucket.first, bucket.last)
            if self._counts[places] == self._expected[places]:
                bucket.stays = RETENTION_STEP_COUNT
        self._renew(self._counts)

    def _renew(self, expected: list[int]) -> None:
        self._expected = expected
        self._counts = [0] * len(expected)
        self._leaving.clear()
        for bucket in self.buckets:
            bucket.missing = sum(map(bool, expected[bucket.first : bucket.last]))
            bucket.sent = None

    def give_up(self) -> None:
        """Nothing has left; the next step starts anew.

        A GPU may be copying what had: that copy is read by nobody, and the next one of these
        bytes comes after it.
        """
        flow, self._flow = self._flow, None
        self._renew(self._expected)
        if flow is not None:
            flow.close()

    def close(self) -> None:
        """Backward is torch's own again."""
        for hook in self._hooks:
            hook.remove()
        self.give_up()


def _buckets(extents: Sequence[ByteRange]) -> list[GradientBucket]:
    """Neighbours on the tape, a piece at least but for the one at the tape's start, which comes
    last.
    """
    found, last = [], len(extents)
    least = piece_nbytes(extents[-1].stop) if extents else 0
    for first in range(len(extents) - 1, -1, -1):
        if first == 0 or extents[last - 1].stop - extents[first].start >= least:
            found.append(GradientBucket(first, last))
            last = first
    return found


def _given(grads: Sequence[Tensor | None]) -> list[bool]:
    return list(map(is_not, grads, repeat(None)))


def _send(flow: PushStream, spans: Sequence[ByteRange]) -> None:
    for start, stop in spans:
        flow.send(start, stop)


def _padded(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _hook(tensor: Tensor, function: Callable[[Tensor], None]) -> Any:
    """torch only takes it from a parameter that trains at the moment; it stays when that is
    switched off and on.
    """
    trains = tensor.requires_grad
    handle = tensor.requires_grad_(True).register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    tensor.requires_grad_(trains)
    return handle


class OverlappedStep(StepStrategy):
    """Makes steps that begin in backward and end in the next forward. See this module's text for
    what is seen.
    """

    def __init__(
        self,
        bridge: ModelAdapter,
        client: JobClient,
        model: nn.Module,
        enter: Enter,
        healing: Healing,
        settle: Callable[[], None],
    ) -> None:
        """See Arrivals for enter, healing and settle."""
        super().__init__(bridge, client)
        self._arrivals = WeightGates(bridge, model, enter, healing, settle)
        self._departures = BucketSender(bridge, self._begin, self._arrivals.check)

    def _begin(self) -> PushStream:
        """A client has one push at a time, so what the last one brings must be here first."""
        self._arrivals.land()
        return self._client.begin()

    def push(self, push: Push) -> PushResult:
        self._arrivals.settle()
        try:
            flow, result, stepped = self._departures.finish(push)
        except BaseException:
            self._departures.give_up()
            raise
        self._arrivals.expect(flow, stepped)
        return result

    def pull(self) -> None:
        """What of the next gradient has left already is dropped, and goes again later."""
        self._arrivals.settle()
        self._departures.give_up()
        super().pull()

    def settle(self) -> None:
        self._arrivals.settle()

    def skip(self) -> None:
        self._departures.give_up()

    def drop(self, error: PSError) -> None:
        with suppress(PSError):
            self._arrivals.settle()
        super().drop(error)

    def close(self) -> None:
        self._arrivals.close()
        self._departures.close()
