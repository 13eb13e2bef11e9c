"""Upper bounds of what one request may ask for. Servers refuse more before they allocate anything.

Each bound is far above what a real job needs. None depends on the length of a training: a loop over
10**9 epochs is two numbers in the ledger.
"""

from pscommon.core.data_stream import Spec, StreamSpec

MAX_BATCHES_PER_REQUEST = 1024
"""Batches that one request for data may ask for."""

MAX_BATCHES_PER_PUSH = 65_536
"""Batches that one push uses up, or that one request returns."""

MAX_BATCH_NUMBER = 2**63 - 1
"""Largest number of a batch; numbers travel as 64 bits."""

MAX_LAPS = 2**44
"""Sources x epochs of a stream. Batch numbers are place x laps + lap, so a lap has room for
2**19 batches.
"""

MAX_SAMPLES_PER_PUSH = 2**48
"""Weight of one gradient in the average of a round."""

MAX_RANK = 1_000_000
MAX_ATTEMPT = 1_000_000

MAX_SHARDS = 4096
"""Servers of one job."""

MAX_TENSORS = 100_000
"""Tensors of one model."""

MAX_NAME_CHARACTERS = 256
"""Of a host, a device, a phase, or the name of a reported value."""

MAX_REASON_CHARACTERS = 2000
"""Of the reason for which a worker leaves; the rest is cut off."""

MAX_METRICS = 1000
"""Names of values that the workers of a job may report."""

MAX_WAIT_MS = 24 * 3600 * 1000
"""How long a request may wait for its answer."""


def loop_problem(spec: Spec) -> str:
    """Return why no ledger can deal the batches of this loop, or an empty string."""
    if isinstance(spec, StreamSpec):
        if spec.laps > MAX_LAPS:
            return f"{spec.sources} sources x {spec.epochs} epochs are above {MAX_LAPS}"
        return ""
    if spec.total > MAX_BATCH_NUMBER:
        return (
            f"{spec.epochs} epochs of {spec.batches_in_epoch} batches are above {MAX_BATCH_NUMBER}"
        )
    return ""
