"""Spans: the timed phases of a step, as the processes of a job record them.

| process | span | begins | ends |
| --- | --- | --- | --- |
| worker | data | the script asks for a batch | it has the batch |
| worker | lease | the script's thread asks shard 0 for batches | it has the answer |
| worker | compute | the script's own work begins | the step or the next batch begins |
| worker | gather | the step begins | the gradient is in the flat buffer |
| worker | send | the request to a shard begins | its last byte is sent |
| worker | receive | the last byte is sent | the last byte of the answer is received |
| worker | scatter | the answers of all shards are there | the weights are in the model |
| shard | receive | the request has arrived | the last byte of the push is received |
| shard | check | the push is received | it is checked for NaN and Inf |
| shard | log | a record is written | it is on disk, as far as `--log-fsync` asks |
| shard | standby | a record was sent to the standby | the standby has acknowledged it |
| shard | apply | the optimizer step begins | it ends |
| shard | copy | the weights of an answer are read | they are copied |
| shard | send | the answer begins | its last byte is sent |
| shard 0 | lease | a request for batches arrives | its answer is made |
| coordinator | barrier | a shard's report of a push arrives | the report that decides it arrives |
| coordinator | decide | the report that decides an update arrives | its Apply is in the log |

The coordinator's spans are in the process of shard 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

COORDINATOR_SPANS = ("barrier", "decide")

SHARD_PHASES = ("receive", "check", "log", "standby", "apply", "copy", "send")


class Span(NamedTuple):
    """One timed phase in one process.

    Attributes:
        name: Name of the phase; see the module.
        began: Start, in seconds of the process's monotonic clock.
        seconds: Duration.
        pushes: Pairs of worker and push number. Of a worker's span: the push of its step, which
            may still follow. Of apply and decide: all pushes of the update. Of shard 0's
            lease: the worker, and 0. Of log, standby and send: empty if no push caused them.
        version: Of apply, copy, barrier and decide: the version that is made or copied. Of a
            worker's receive: the version of the weights in the answer. Of lease: the number of
            batches that the worker has received before, which joins both ends. Otherwise 0.
        shard: Of a worker's send and receive: the shard at the other end. Of barrier: the shard
            that reports. Otherwise 0.
        thread: Name of the thread.
    """

    name: str
    began: float
    seconds: float
    pushes: tuple[tuple[int, int], ...] = ()
    version: int = 0
    shard: int = 0
    thread: str = ""

    @property
    def ended(self) -> float:
        return self.began + self.seconds


class ProcessSpans(NamedTuple):
    """The spans of one process.

    Attributes:
        role: "worker" or "shard".
        number: The worker's number, or the shard.
        spans: In the order in which they ended.
        offset_seconds: What to add to the process's clock to get the clock of shard 0.
        uncertainty_seconds: How far the offset may be off; None: it is not known yet.
        dropped_steps: Steps whose spans were dropped because there were too many.
    """

    role: str
    number: int
    spans: Sequence[Span]
    offset_seconds: float = 0.0
    uncertainty_seconds: float | None = None
    dropped_steps: int = 0
