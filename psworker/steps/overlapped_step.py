"""Steps that begin in backward and end in the next forward.

Theory of operation:

- Gradients leave in buckets during backward, the last layers first (`BucketSender`).
- Forward waits for the new weights module by module (`weight_gates`).
- Results are the same as without overlap. `push` compares byte by byte what has left early with
  the current gradients, and sends again what differs.
- torch's counter of in-place changes would be cheaper, but it misses some: GradScaler's
  unscaling, `parameter.grad.data.mul_`, writes through numpy.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress, groupby, repeat
from operator import is_not
from typing import ClassVar, cast

import torch
from torch import Tensor

from pscommon.core.errors import FencedError, PSError
from pscommon.core.partition import ByteRange, padded, piece_nbytes
from pscommon.tracing.recorder import worker_spans
from psworker.core.protocols import BegunPush
from psworker.core.results import PushResult
from psworker.model.adapter import ModelAdapter
from psworker.model.flat_buffer import CopyEvent
from psworker.model.gradient_watch import add_gradient_hook
from psworker.steps.step import PlainStep, Push, StepContext
from psworker.steps.weight_gates import WeightGates

RETENTION_STEP_COUNT = 100
"""Steps for which a bucket leaves only in step(), after the script has changed gradients that had
left, for example by clipping.
"""


@dataclass(slots=True)
class GradientBucket:
    """The trainable tensors [first, last) in flat buffer order, which leave together.

    Attributes:
        missing: Number of its tensors that still lack gradients in this step.
        sent: Which of its tensors had a gradient when they left; None: they have not left.
        hold_steps: Number of steps for which it leaves only in step().
    """

    first: int
    last: int
    missing: int = 0
    sent: list[bool] | None = None
    hold_steps: int = 0

    @property
    def places(self) -> range:
        return range(self.first, self.last)


class BucketSender:
    """Sends each bucket as soon as backward has made its gradients.

    A parameter is expected to get as many gradients as in the step before. So accumulation over
    several backwards sends once, and an unused layer delays no bucket.

    Args:
        begin: Opens a push.
        check: Receives the place of each new gradient; raises if it cannot be right.
    """

    def __init__(
        self, adapter: ModelAdapter, begin: Callable[[], BegunPush], check: Callable[[int], None]
    ) -> None:
        self._adapter = adapter
        self._begin = begin
        self._check = check
        self._begun: BegunPush | None = None
        self._extents = adapter.trainable.extents
        self.buckets = _buckets(self._extents)
        self._bucket_of = [bucket for bucket in reversed(self.buckets) for _ in bucket.places]
        self._expected = [1] * len(self._extents)
        self._copies: deque[tuple[CopyEvent, list[ByteRange]]] = deque()
        self._start_step(self._expected)
        self._hooks = [
            add_gradient_hook(tensor, self._counter(i))
            for i, tensor in enumerate(adapter.trainable.tensors)
        ]

    def _counter(self, place: int) -> Callable[[Tensor], None]:
        bucket = self._bucket_of[place]

        def count_gradient(parameter: Tensor) -> None:
            self._check(place)
            self._counts[place] = count = self._counts[place] + 1
            if count == self._expected[place]:
                bucket.missing -= 1
                if not bucket.missing and not bucket.hold_steps:
                    self._send_bucket(bucket)

        return count_gradient

    @torch.no_grad()
    def _send_bucket(self, bucket: GradientBucket) -> None:
        grads = self._adapter.grads(bucket.first, bucket.last)
        self._adapter.write(bucket.first, grads)
        bucket.sent = _given(grads)
        spans = self._spans(bucket, grads)
        self._copies.append((self._adapter.gradients.to_host(spans), spans))
        try:
            self._begun = begun = self._begun or self._begin()
        except FencedError:  # a rejoin is not possible in backward: `finish` raises it again
            return
        while self._copies and self._copies[0][0].query():
            _send(begun, self._copies.popleft()[1])

    def finish(self, push: Push) -> tuple[BegunPush, PushResult, set[int]]:
        """Send what has not left as it is now, and wait for the decision.

        Returns:
            The open push, its outcome, and the places of the tensors that had a gradient.
        """
        self._begun = begun = self._begun or self._begin()
        began = worker_spans.now()
        for ready, spans in self._copies:
            ready.synchronize()
            _send(begun, spans)
        # Not earlier: it waits for all queued work of a GPU, which the buckets above need not.
        self._adapter.reattach()
        grads = self._adapter.grads()
        absent, again = self._adapter.absent(grads), self._send_changed(begun, grads)
        self._adapter.changes.step(absent)
        if began:
            worker_spans.add_of_step("gather", began)
        result = begun.finish(
            absent=absent, samples=push.samples, batches=push.batches, groups_json=push.groups_json
        )
        self._learn(again)
        self._begun = None
        return begun, result, set(compress(range(len(grads)), _given(grads)))

    def _send_changed(self, begun: BegunPush, grads: list[Tensor | None]) -> list[GradientBucket]:
        """Send the buckets that have not left with these bytes; return those that leave again."""
        changed = self._changed(grads)
        for bucket in changed:
            self._adapter.write(bucket.first, grads[bucket.first : bucket.last])
        self._adapter.write_buffers()
        spans = [
            span
            for bucket in changed
            for span in self._spans(bucket, grads[bucket.first : bucket.last])
        ]
        self._adapter.gradients.to_host([*spans, self._adapter.buffer_range]).synchronize()
        _send(begun, spans)
        return [bucket for bucket in changed if bucket.sent is not None]

    def _changed(self, grads: list[Tensor | None]) -> list[GradientBucket]:
        """Return the buckets that have not left with exactly these bytes."""
        given, slots = _given(grads), self._adapter.trainable.gradients
        left = [
            bucket for bucket in self.buckets if bucket.sent == given[bucket.first : bucket.last]
        ]
        pairs = [
            (place, grad)
            for bucket in left
            for place in bucket.places
            if (grad := grads[place]) is not None
        ]
        same = self._adapter.gradients.are_equal(
            [slots[place] for place, _ in pairs], [grad for _, grad in pairs]
        )
        differ = {place for (place, _), equal in zip(pairs, same, strict=True) if not equal}
        return [
            bucket
            for bucket in self.buckets
            if bucket not in left or not differ.isdisjoint(bucket.places)
        ]

    def _spans(self, bucket: GradientBucket, grads: list[Tensor | None]) -> list[ByteRange]:
        """Return the fewest byte ranges with the bucket's gradients; they may include padding."""
        spans, first = [], bucket.first
        for here, run in groupby(_given(grads)):
            last = first + len(list(run))
            if here:
                spans.append(
                    ByteRange(self._extents[first].start, padded(self._extents[last - 1].stop))
                )
            first = last
        return [span for span in spans if span.nbytes]

    def _learn(self, again: list[GradientBucket]) -> None:
        """Expect the same number of gradients in the next step."""
        for bucket in self.buckets:
            bucket.hold_steps = max(0, bucket.hold_steps - 1)
        for bucket in again:
            places = slice(bucket.first, bucket.last)
            if self._counts[places] == self._expected[places]:
                bucket.hold_steps = RETENTION_STEP_COUNT
        self._start_step(self._counts)

    def _start_step(self, expected: list[int]) -> None:
        self._expected = expected
        self._counts = [0] * len(expected)
        self._copies.clear()
        for bucket in self.buckets:
            bucket.missing = sum(map(bool, expected[bucket.first : bucket.last]))
            bucket.sent = None

    def drop(self) -> None:
        """Give up the open push; all buckets leave again in the next step.

        A copy that a GPU still makes is never read, and the next copy of these bytes follows it.
        """
        begun, self._begun = self._begun, None
        self._start_step(self._expected)
        if begun is not None:
            begun.close()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self.drop()


def _buckets(extents: Sequence[ByteRange]) -> list[GradientBucket]:
    """Return buckets of neighbours in the flat buffer, from its end to its start.

    Each has at least the bytes of one piece; the one at the start may have fewer.
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


def _send(begun: BegunPush, spans: Sequence[ByteRange]) -> None:
    for start, stop in spans:
        begun.send(start, stop)


class OverlappedStep(PlainStep):
    """A step that begins in backward and ends in the next forward. See the module."""

    is_deferred: ClassVar[bool] = False

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._gates = WeightGates(context)
        self._sender = BucketSender(
            cast(ModelAdapter, context.adapter), self._begin, self._gates.check
        )

    def _begin(self) -> BegunPush:
        """Open a push, once the weights of the one before have arrived: a client has one push."""
        self._gates.receive()
        return self._model.begin()

    def push(self, push: Push) -> PushResult:
        self._gates.settle()
        try:
            begun, result, stepped = self._sender.finish(push)
        except BaseException:
            self._sender.drop()
            raise
        self._gates.expect(begun, stepped)
        self.version = result.version
        return result

    def pull(self) -> None:
        """Load the newest weights. Gradients that have left are dropped, and leave again."""
        self._gates.settle()
        self._sender.drop()
        super().pull()

    def settle(self) -> None:
        self._gates.settle()

    def skip(self) -> None:
        self._sender.drop()

    def drop(self, error: PSError) -> None:
        with suppress(PSError):
            self._gates.settle()
        self._sender.drop()

    def close(self) -> None:
        self._gates.close()
        self._sender.close()
