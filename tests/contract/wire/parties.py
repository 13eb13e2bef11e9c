"""The processes of the conversation: the worker's steps and the servers' settings."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from typing import Any
from unittest.mock import patch

import numpy as np

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from psserver.process import worker_keys
from psserver.process.worker_keys import JOB_KEY_BYTES, WorkerKeys
from psworker import Client, OptimizerSpec
from psworker.client.arrays import ArrayBuffer
from tests.contract.wire.conversation import EXCHANGE, HEARTBEAT

JOB = "wire"
SETTINGS: Mapping[str, Any] = {
    "job": JOB,
    "policy": "sync",
    "lease": 600.0,
    "lanes": "grpc",
    "bad_gradients": "skip",
}

JOB_KEY = bytes(range(JOB_KEY_BYTES))


def key_of_worker() -> bytes:
    """Return the key of the conversation's worker, which has the number 1."""
    keys = WorkerKeys(1)
    keys.learn(JOB_KEY)
    return keys.key_of(1)


def fixed_job_key() -> AbstractContextManager[object]:
    """Let each shard 0 have this key of the job, so that workers have the same keys again."""
    return patch.object(worker_keys.secrets, "token_bytes", lambda nbytes: JOB_KEY)


LOOP = LoopSpec(0, size=10, batch_size=4, epochs=1, seed=3)
WEIGHTS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
    "b": np.array([0.5, -0.25], np.float32),
}
BUFFERS = {"mean": np.array([1.0, 2.0], np.float32)}
FROZEN = {"table": np.array([3.0], np.float32)}


def gradients(step: int) -> dict[str, Any]:
    """Return fixed gradients."""
    return {
        "a": WEIGHTS["a"] * np.float32(step) - np.float32(0.5),
        "b": WEIGHTS["b"] / np.float32(step),
    }


def work(address: str, wait_for: Callable[[str, int], object]) -> dict[str, Any]:
    """Run one worker from Join to Leave; return its last pulled weights.

    wait_for: wait until servers have received this number of calls.
    """
    with Client(address, rank=0, lanes="grpc", connect_timeout=30.0, wait_timeout=60.0) as client:
        client.register(WEIGHTS, OptimizerSpec("adam", lr=0.01), buffers=BUFFERS, frozen=FROZEN)
        wait_for(HEARTBEAT, 1)
        assert client.push_pull(gradients(1)).status == "applied"
        assert (
            client.push({"b": gradients(2)["b"], "mean": BUFFERS["mean"] * 3}, samples=3).status
            == "applied"
        )
        assert client.push({"b": gradients(2)["b"] * np.float32(np.nan)}).status == "rejected"
        _step_through_data(client, wait_for)
        client.report(loss=0.5)
        return client.pull()


def _step_through_data(client: Client, wait_for: Callable[[str, int], object]) -> None:
    """Push two batches with their data positions and return one; the push is sent in pieces."""
    lease = client.data.next_batches(LOOP, 3, idle=True)
    memory, weights = client.model.flat_buffers()
    buffer = ArrayBuffer(client.plan, memory)
    given = buffer.check_gradients(gradients(3))
    buffer.write_gradients(given, ArrayBuffer(client.plan, weights), {})
    absent = buffer.absent(given)
    pushed, returned = lease.numbers[:2], lease.numbers[2:]
    with closing(client.model.begin()) as flow:
        flow.send(0, 8)
        wait_for(EXCHANGE, 2)  # or a shard's part is sent in one message
        batches = [BatchKey(0, number) for number in pushed]
        assert flow.finish(absent=absent, samples=8, batches=batches).status == "applied"
        flow.wait(0, len(weights))
    client.data.return_batches([BatchKey(0, number) for number in returned])


def read_only(weights: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(weights[name]).tobytes() for name in sorted(weights)}


def numbers_of(store: Any) -> dict[str, bytes]:
    """Return weights and optimizer state of one shard."""
    return {key: tensor.numpy().tobytes() for key, tensor in sorted(store.export().items())}
