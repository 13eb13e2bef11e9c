"""Contender: TensorFlow's ParameterServerStrategy, one server and one worker. Args: SETUP [JOB
CLUSTER].

Runs in an environment of its own (`make bench-tf`) that has nothing of ours but this folder. A
step reads all variables, as a forward pass does, and pushes gradients of 1 with assign_sub,
which is SGD. A read and a push of one variable follow each other; those of different variables
may overlap as TensorFlow likes.

The step is called directly, not through ClusterCoordinator.schedule, which costs a few
milliseconds more. Words: "worker" runs it on the worker's server, which is faster with many
bytes; "coordinator" runs it in this process, which is faster with few.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from benchmarks.contenders import own_network
from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from benchmarks.speaker import Measurements, serve

WARM_UP_COUNT = 5
Cluster = dict[str, list[str]]


def free_ports(count: int) -> list[int]:
    """Return ports that stay free: no other process uses this network."""
    with ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in made:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in made]


def server(job: str, cluster: Cluster) -> None:
    """A server of TensorFlow until standard input ends."""
    import tensorflow as tf  # type: ignore[import-untyped]

    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=0, protocol="grpc"
    )
    sys.stdin.read()
    del server


class Training:
    """Variables on the server, and a step that pushes and pulls all of them."""

    def __init__(self, setup: Setup, cluster: Cluster) -> None:
        import tensorflow as tf

        self._tf, self._setup, self._updates = tf, setup, 0
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc"
        )
        with tf.distribute.ParameterServerStrategy(resolver).scope():
            self._variables = [
                tf.Variable(tf.zeros(shape), name=name)
                for name, shape in shapes(setup.model, setup.nbytes).items()
            ]

    def work(self, job: str) -> Callable[[], Measurements]:
        """A turn of steps that the process of that job runs, where its gradients are."""
        tf, device = self._tf, f"/job:{job}/replica:0/task:0/device:CPU:0"
        with tf.device(device):
            gradients = [tf.Variable(tf.ones(variable.shape)) for variable in self._variables]
        step = tf.function(lambda: self._push_pull(gradients))

        def turn() -> Measurements:
            began = time.perf_counter()
            for _ in range(self._setup.pieces):
                with tf.device(device):
                    total = step().numpy()
            seconds = (time.perf_counter() - began) / self._setup.pieces
            self._check(float(total))
            return {"seconds": seconds, "count": self._setup.pieces}

        return turn

    def _push_pull(self, gradients: Sequence[Any]) -> Any:
        """The sum of one number of every tensor as it was read: needs each of them whole where
        the step runs.
        """
        tf, seen = self._tf, []
        for variable, gradient in zip(self._variables, gradients, strict=True):
            weights = variable.read_value()
            with tf.control_dependencies([weights]):
                variable.assign_sub(self._setup.rate * gradient)
            seen.append(tf.gather(weights, variable.shape[0] - 1))
        return tf.add_n(seen)

    def _check(self, total: float) -> None:
        """Weights as the last step read them, before its own push."""
        self._updates += self._setup.pieces
        expected = -self._setup.rate * (self._updates - 1) * len(self._variables)
        if abs(total - expected) > 1e-2 * abs(expected) + 1e-6:
            raise RuntimeError(
                f"after {self._updates} updates the weights sum up to {total}, not {expected}"
            )


def main(setup: Setup) -> None:
    # TensorFlow's servers listen on 0.0.0.0, whatever address the cluster gives them
    own_network.enter()
    ps, worker = (f"127.0.0.1:{port}" for port in free_ports(2))
    cluster = {"ps": [ps], "worker": [worker]}
    with ExitStack() as stack:
        for job in cluster:
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                setup.to_json(),
                job,
                json.dumps(cluster),
            ]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            )
            assert process.stdin is not None
            stack.callback(process.stdin.close)
        training = Training(setup, cluster)
        serve(
            {"worker": training.work("worker"), "coordinator": training.work("chief")},
            WARM_UP_COUNT,
        )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main(Setup.from_json(sys.argv[1]))
