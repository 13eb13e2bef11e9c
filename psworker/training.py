"""The small API: `DistributedTraining().train_distributed(model, data, nodes=3)` trains on a
cluster of its own.
"""

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pscommon.core.errors import InvalidRequestError
from pscommon.system import signals as interruptible
from psworker.client.client import Client
from psworker.connect import choose_device
from psworker.data.random_state import preserved_generators
from psworker.job import Job
from psworker.local_servers import LocalServers
from psworker.optim.optimizer import ServerOptimizer
from psworker.session.arguments import whole
from psworker.session.drain import Stopping
from psworker.session.environment import without_settings
from psworker.training_arguments import (
    Loss,
    MakeOptimizer,
    checked_loss,
    made_module,
    optimizer_maker,
)

log = logging.getLogger("psworker")

LOG_SECONDS = 5.0
STOP_SECONDS = 5.0
"""How long nodes that are told to stop may take for the step that they are in."""


@dataclass(slots=True)
class TrainingNode:
    """What one worker brings back."""

    steps: int = 0
    samples: int = 0
    loss: float = float("nan")
    state: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False


class DistributedTraining:
    """Trains a model on several workers and servers with one call.

    Args:
        servers: Number of shards that hold the weights.
        policy: sync, async or ssp, as of ps-server.
        staleness: The S of ssp.
        ps: "HOST:PORT" of running servers. None: start servers on this machine for each call.
    """

    def __init__(
        self,
        servers: int = 1,
        policy: str = "sync",
        staleness: int | None = None,
        ps: str | None = None,
    ) -> None:
        self.servers = servers
        self.policy = policy
        self.staleness = staleness
        self.ps = ps

    def train_distributed(
        self,
        model: nn.Module | str,
        data: Any,
        nodes: int = 3,
        use_gpus: bool = False,
        epochs: int = 1,
        batch_size: int = 64,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        simulate: bool = False,
        clip_norm: float | None = None,
    ) -> dict[str, Any]:
        """Train a model and return what came out.

        Each worker is a thread of this process, with a copy of the model and connections of its
        own. The servers are processes; no PS_<FLAG> in the environment applies to them. Each
        sample is used once per epoch, by one of the workers.

        Args:
            model: A module, which ends with the trained weights, or "package.module:function"
                that makes one. It trains in the mode, train() or eval(), in which it comes.
            data: A map-style dataset of (input, target), or a pair of tensors. An input or target
                may be a dict, list or tuple of tensors; the model is called with the whole input.
            nodes: Number of workers.
            use_gpus: Compute on the CUDA devices in turn.
            epochs: Passes over the data.
            batch_size: Samples per batch and worker.
            loss: loss(output, target). Default: cross entropy for integer targets, otherwise mean
                squared error. It must not use parameters of the given model, which no worker
                trains.
            optimizer: Makes an optimizer from parameters, or is one whose settings are used.
                Default: Adam.
            shuffle: A new order in each epoch.
            seed: Of the order.
            simulate: Run the same workers, servers and policies one step at a time in this
                process, with the same result every time.
            clip_norm: As of Job.optimizer.

        Returns:
            model_name, nodes_used, device, status, steps, samples, seconds, final_loss and
            state_dict. `status` is "done", or "stopped" if the job was stopped or all workers
            were drained. `final_loss` is the mean over the last batches of the workers, NaN
            without any.

        Raises:
            InvalidRequestError: An argument does not fit, or there is no GPU for use_gpus.
        """
        nodes = whole("nodes", nodes, 1)
        if simulate and self.ps is not None:
            raise InvalidRequestError(
                f"simulate=True has servers of its own: leave out ps={self.ps!r}"
            )
        module = made_module(model)
        data, loss = _paired(data), checked_loss(loss)
        task = _TrainingTask(
            data,
            epochs,
            batch_size,
            loss,
            optimizer_maker(optimizer, module),
            shuffle,
            seed,
            clip_norm,
        )
        devices = [choose_device("cuda" if use_gpus else "cpu", node) for node in range(nodes)]
        began = time.monotonic()
        run = self._simulated if simulate else self._real
        with run(nodes) as cluster, preserved_generators(), _copies_train(module):
            results = _train_all(cluster, task, module, devices)
        if self.ps is not None and not any(node.steps for node in results):
            log.warning(
                "nothing was trained, and the model has the weights of the job at %s: it had been "
                "through its data "
                "before; a job is one training, so for another one start other servers",
                self.ps,
            )
        return {
            "model_name": type(module).__name__,
            "nodes_used": nodes,
            "device": str(devices[0]),
            "seconds": time.monotonic() - began,
            **_brought_back(module, results),
        }

    @contextlib.contextmanager
    def _real(self, nodes: int) -> Iterator["TrainingCluster"]:
        if self.ps is not None:
            yield TrainingCluster(lambda node: Client(self.ps, rank=node))
            return
        # a folder or port that is meant for another job is not for these
        environ = without_settings(os.environ)
        with LocalServers(self.servers, nodes, self.policy, self.staleness, environ) as servers:
            yield TrainingCluster(lambda node: Client(servers.address, rank=node))

    @contextlib.contextmanager
    def _simulated(self, nodes: int) -> Iterator["TrainingCluster"]:
        from psworker.simulation import DirectTransport, simulated

        cluster = simulated(self.servers, nodes, self.policy, self.staleness)
        yield TrainingCluster(
            lambda node: Client(lane=DirectTransport(cluster, node), rank=node),
            cluster.turns.enter,
            cluster.turns.leave,
        )


@dataclass(frozen=True, slots=True)
class TrainingCluster:
    """How a node connects, and what it does before and after (a simulation's turns)."""

    connect: Callable[[int], Client]
    enter: Callable[[int], None] = lambda node: None
    leave: Callable[[int], None] = lambda node: None


@dataclass(frozen=True, slots=True)
class _TrainingTask:
    """What every node trains."""

    data: Any
    epochs: int
    batch_size: int
    loss: Loss
    make_optimizer: MakeOptimizer
    shuffle: bool
    seed: int
    clip_norm: float | None


class _StopReason:
    """Why the nodes stop before they are done, if they do: the first error. Then all of them are
    asked to leave.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._clients: list[Client] = []

    def concerns(self, client: Client) -> None:
        """One more node's."""
        self._clients.append(client)
        if self.errors:
            client.drain()

    def begin(self, error: BaseException) -> None:
        self.errors.append(error)
        for client in list(self._clients):
            client.drain()


def _train_all(
    cluster: TrainingCluster, task: _TrainingTask, module: nn.Module, devices: list[torch.device]
) -> list[TrainingNode]:
    """All nodes to the end. After the first error, or Ctrl-C, they stop; then it is raised."""
    results = [TrainingNode() for _ in devices]
    ending = _StopReason()
    threads = [
        threading.Thread(
            target=_node,
            args=(cluster, task, copy.deepcopy(module), device, number, result, ending),
            daemon=True,  # after Ctrl-C a node that is stuck must not keep the process
        )
        for number, (device, result) in enumerate(zip(devices, results, strict=True))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            interruptible.join(thread)
    except BaseException as interruption:
        ending.begin(interruption)
        for thread in threads:
            if thread.is_alive():
                thread.join(STOP_SECONDS)
        raise
    if ending.errors:
        raise ending.errors[0]
    return results


def _node(
    cluster: TrainingCluster,
    task: _TrainingTask,
    model: nn.Module,
    device: torch.device,
    number: int,
    result: TrainingNode,
    ending: _StopReason,
) -> None:
    cluster.enter(number)
    try:
        client = cluster.connect(number)
        with Job(client, number, device) as job:
            ending.concerns(client)
            _train(job, task, model.to(device), result)
    except Stopping:
        result.stopped = True
    except BaseException as error:
        ending.begin(error)
    finally:
        cluster.leave(number)


@contextlib.contextmanager
def _copies_train(given: nn.Module) -> Iterator[None]:
    """A loss that uses parameters of the module itself, in a penalty say, is refused: it would
    train nothing.
    """
    trainable = [p for p in given.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]
    hooks = [parameter.register_hook(_refuse_gradient) for parameter in trainable]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_gradient(gradient: Tensor) -> None:
    raise InvalidRequestError(
        "loss(output, target) uses parameters of the model that was given, but each node trains a "
        "copy of it: let the "
        "model return what the loss needs, and penalize weights with the optimizer's weight_decay"
    )


def _train(job: Job, task: _TrainingTask, model: nn.Module, result: TrainingNode) -> None:
    """A worker's whole life: what a user's script would say."""
    optimizer = job.optimizer(
        task.make_optimizer(model.parameters()), model, clip_norm=task.clip_norm
    )
    try:
        _go_through(job, task, model, optimizer, result)
    finally:
        result.state = _state(model)
    log.info("worker %d: done after %d steps, loss %.4f", job.rank, result.steps, result.loss)


def _go_through(
    job: Job,
    task: _TrainingTask,
    model: nn.Module,
    optimizer: ServerOptimizer,
    result: TrainingNode,
) -> None:
    loss_of, told = _placed(task.loss, job.device), time.monotonic()
    for batch in job.batches(task.data, task.batch_size, task.epochs, task.shuffle, task.seed):
        inputs, target = _moved(_pair(batch), job.device)
        loss, samples = loss_of(model(inputs), target), job.session.consumed.samples
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = (
                f"a tensor of shape {list(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise InvalidRequestError(
                f'loss(output, target) is {shape}, not one number, as with reduction="mean"'
            )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        result.steps, result.samples, result.loss = (
            result.steps + 1,
            result.samples + samples,
            loss.item(),
        )
        if time.monotonic() - told >= LOG_SECONDS:
            told = time.monotonic()
            log.info("worker %d: step %d, loss %.4f", job.rank, result.steps, result.loss)


def _brought_back(module: nn.Module, results: list[TrainingNode]) -> dict[str, Any]:
    """What the nodes bring back; the module gets the weights of one that has gone through all,
    where there is one.
    """
    finished = [node for node in results if not node.stopped]
    newest = next((node.state for node in [*finished, *results] if node.state), None) or _state(
        module
    )
    module.load_state_dict(newest)
    return {
        "status": "done" if finished else "stopped",
        "steps": sum(node.steps for node in results),
        "samples": sum(node.samples for node in results),
        "final_loss": _mean([node.loss for node in results if node.steps]),
        "state_dict": newest,
    }


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: _kept(value) for name, value in model.state_dict().items()}


def _paired(data: Any) -> Any:
    """The data set; for a pair of tensors, listed or not, one of their rows."""
    if isinstance(data, DataLoader):
        raise InvalidRequestError(
            "data is a DataLoader, and each node makes its own batches. Try: give the data set "
            "that it has (loader.dataset), and batch_size and shuffle as arguments"
        )
    if isinstance(data, tuple) or (
        isinstance(data, list) and data and all(isinstance(item, Tensor) for item in data)
    ):
        if len(data) != 2:
            raise InvalidRequestError(
                f"data is a pair of tensors, inputs and targets, or a data set, not {len(data)} "
                f"of them"
            )
        return tuple(data)
    return data


def _pair(batch: Any) -> Any:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch
    size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise InvalidRequestError(
        f"a sample of data is a pair, (input, target), not a {type(batch).__name__}{size}"
    )


def _placed(loss: Loss, device: torch.device) -> Loss:
    """Where a loss has tensors (class weights), on the device; the user's own stays where it is."""
    return (
        copy.deepcopy(loss).to(device)
        if isinstance(loss, nn.Module) and device.type != "cpu"
        else loss
    )


def _moved(item: Any, device: torch.device) -> Any:
    """With all tensors in it on the device."""
    if isinstance(item, Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {key: _moved(value, device) for key, value in item.items()}
    if isinstance(item, tuple | list):
        return [_moved(value, device) for value in item]
    return item


def _kept(value: Any) -> Any:
    """An entry of a state_dict, which is what a module likes (get_extra_state), apart from the
    module.
    """
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
