"""The job's key, and the keys of workers that are made of it: no worker can act as another one.

A worker's key is what `Join` returns: KEY_NAME_BYTES that name the job's key, then
HMAC-SHA256(job key, worker number). The name tells a key that is wrong from one of an earlier job
key, which a shard 0 without a data directory has forgotten at its restart.
"""

import hmac
import secrets

from pscommon.core.errors import AuthenticationError, UnreachableError, out_of_the_job

JOB_KEY_BYTES = 32
KEY_NAME_BYTES = 8

MAX_VALID_KEYS = 1024
"""Presented keys that are remembered; above this number all are forgotten, and computed again."""

RESTARTED = "shard 0 has a new job key since its restart, and has forgotten its earlier workers"


class WorkerKeys:
    """Makes and checks the keys of workers. Thread-safe.

    Attributes:
        job_key: The job's key; empty on other shards than 0 until shard 0 has sent it.
    """

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self.job_key = secrets.token_bytes(JOB_KEY_BYTES) if shard == 0 else b""
        self._valid: dict[int, bytes] = {}  # keys that were presented, by worker

    def learn(self, job_key: bytes) -> None:
        """Use this key of the job from now on."""
        if job_key != self.job_key:
            self.job_key, self._valid = job_key, {}

    def key_of(self, worker: int) -> bytes:
        """Return the key of a worker."""
        job_key = self.job_key
        return _digest(job_key, 0)[:KEY_NAME_BYTES] + _digest(job_key, worker)

    def is_valid(self, worker: int, key: bytes) -> bool:
        """Return whether a worker has presented this key before. False: `check` decides."""
        valid = self._valid.get(worker)
        return valid is not None and hmac.compare_digest(valid, key)

    def check(self, worker: int, key: bytes) -> None:
        """Check that a peer is this worker. An observer (worker 0) needs no key.

        Raises:
            AuthenticationError: It has no key, or that of another worker.
            FencedError: On shard 0: its key is of an earlier job key.
            UnreachableError: On another shard: this shard does not have the key of the job yet.
        """
        if not worker:
            return
        if not key:
            raise AuthenticationError(
                f"a request of worker {worker} is refused: it has no key. Try: start the worker "
                "again, with the release of paramserver that the servers have",
                "UNAUTHENTICATED",
            )
        valid, expected = self._valid, self.key_of(worker)
        is_other = not hmac.compare_digest(key[:KEY_NAME_BYTES], expected[:KEY_NAME_BYTES])
        if not self.job_key or (is_other and self._shard and len(key) == len(expected)):
            raise UnreachableError(
                f"shard {self._shard} does not have the job's key of worker {worker} yet",
                "NOT_READY",
            )
        if is_other and len(key) == len(expected):
            raise out_of_the_job(worker, RESTARTED)
        if not hmac.compare_digest(key, expected):
            raise AuthenticationError(
                f"a request of worker {worker} is refused: its key is not that worker's. Try: "
                f"start the worker again; this process did not join as worker {worker}",
                "UNAUTHENTICATED",
            )
        if len(valid) >= MAX_VALID_KEYS:  # most of them belong to workers that have left
            valid.clear()
        valid[worker] = expected


def _digest(job_key: bytes, worker: int) -> bytes:
    return hmac.digest(job_key, worker.to_bytes(8, "big"), "sha256")
