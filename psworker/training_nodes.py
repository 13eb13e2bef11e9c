"""The workers of `train_distributed`: threads that train copies of one model."""

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pscommon.core.errors import InvalidRequestError
from pscommon.system import signals as interruptible
from pscommon.telemetry.logs import get_logger
from psworker.client.client import Client
from psworker.job import Job
from psworker.session.drain import Stopping

log = get_logger(__name__)

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

LOG_INTERVAL_SECONDS = 5.0
STOP_TIMEOUT_SECONDS = 5.0
"""Time that nodes have for their current step when training is interrupted."""


@dataclass(frozen=True, slots=True)
class TrainingCluster:
    """How a node connects to the servers.

    Attributes:
        connect: Returns the client of the node with this number.
        enter: Called by a node before its first request (a simulation's turns).
        leave: Called by a node after its last request.
    """

    connect: Callable[[int], Client]
    enter: Callable[[int], None] = lambda node: None
    leave: Callable[[int], None] = lambda node: None


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What every node trains; the fields are arguments of `train_distributed`."""

    data: Any
    epochs: int
    batch_size: int
    loss: Loss
    make_optimizer: MakeOptimizer
    shuffle: bool
    seed: int
    clip_norm: float | None


@dataclass(slots=True)
class TrainingNode:
    """The results of one worker.

    Attributes:
        loss: Loss of its last batch.
        state: Copy of its model's state_dict, on the CPU.
        is_stopped: It was asked to leave before the end.
    """

    steps: int = 0
    samples: int = 0
    loss: float = float("nan")
    state: dict[str, Any] = field(default_factory=dict)
    is_stopped: bool = False


class NodeFailures:
    """Errors of nodes; the first one asks all nodes to leave.

    Attributes:
        errors: The errors, the first one first.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._clients: list[Client] = []

    def watch(self, client: Client) -> None:
        """Add a node by its client."""
        self._clients.append(client)
        if self.errors:
            client.drain()

    def add(self, error: BaseException) -> None:
        self.errors.append(error)
        for client in list(self._clients):
            client.drain()


def train_nodes(
    cluster: TrainingCluster, task: TrainingTask, module: nn.Module, devices: list[torch.device]
) -> list[TrainingNode]:
    """Train copies of the module, one thread per device, and return their results.

    Raises the first error of a node, or KeyboardInterrupt, after the other nodes have stopped.
    """
    results = [TrainingNode() for _ in devices]
    failures = NodeFailures()
    threads = [
        threading.Thread(
            target=_run_node,
            args=(cluster, task, copy.deepcopy(module), device, number, result, failures),
            daemon=True,  # a node that blocks after Ctrl-C must not keep the process alive
        )
        for number, (device, result) in enumerate(zip(devices, results, strict=True))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            interruptible.join(thread)
    except BaseException as interruption:
        failures.add(interruption)
        for thread in threads:
            if thread.is_alive():
                thread.join(STOP_TIMEOUT_SECONDS)
        raise
    if failures.errors:
        raise failures.errors[0]
    return results


def _run_node(
    cluster: TrainingCluster,
    task: TrainingTask,
    model: nn.Module,
    device: torch.device,
    number: int,
    result: TrainingNode,
    failures: NodeFailures,
) -> None:
    cluster.enter(number)
    try:
        client = cluster.connect(number)
        with Job(client, number, device) as job:
            failures.watch(client)
            _train(job, task, model.to(device), result)
    except Stopping:
        result.is_stopped = True
    except BaseException as error:
        failures.add(error)
    finally:
        cluster.leave(number)


def _train(job: Job, task: TrainingTask, model: nn.Module, result: TrainingNode) -> None:
    optimizer = job.optimizer(
        task.make_optimizer(model.parameters()), model, clip_norm=task.clip_norm
    )
    loss_function, logged_at = _loss_on_device(task.loss, job.device), time.monotonic()
    try:
        for batch in job.batches(task.data, task.batch_size, task.epochs, task.shuffle, task.seed):
            inputs, target = _to_device(_check_pair(batch), job.device)
            loss = _check_scalar(loss_function(model(inputs), target))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            result.steps += 1
            result.samples = job.stats.samples
            result.loss = loss.item()
            if time.monotonic() - logged_at >= LOG_INTERVAL_SECONDS:
                logged_at = time.monotonic()
                log.info(
                    "training_progress",
                    rank=job.rank,
                    steps=result.steps,
                    loss=round(result.loss, 4),
                )
    finally:
        result.state = copy_state(model)
    log.info("training_finished", rank=job.rank, steps=result.steps, loss=round(result.loss, 4))


def _check_pair(batch: Any) -> Any:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch
    size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise InvalidRequestError(
        f"a sample of data is not a pair, but a {type(batch).__name__}{size}. Try: samples (input, "
        "target)"
    )


def _check_scalar(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = (
        f"a tensor of shape {list(loss.shape)}"
        if isinstance(loss, Tensor)
        else f"a {type(loss).__name__}"
    )
    raise InvalidRequestError(
        f'loss(output, target) is not one number, but {found}. Try: a loss with reduction="mean"'
    )


def _loss_on_device(loss: Loss, device: torch.device) -> Loss:
    """Return the loss with its tensors (class weights) on the device; the given one stays."""
    is_moved = isinstance(loss, nn.Module) and device.type != "cpu"
    return copy.deepcopy(loss).to(device) if is_moved else loss  # type: ignore[attr-defined]


def _to_device(item: Any, device: torch.device) -> Any:
    if isinstance(item, Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {key: _to_device(value, device) for key, value in item.items()}
    if isinstance(item, tuple | list):
        return [_to_device(value, device) for value in item]
    return item


def copy_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of the model's state_dict, with tensors on the CPU."""
    return {name: _copy(value) for name, value in model.state_dict().items()}


def _copy(value: Any) -> Any:
    # a state_dict may hold anything (get_extra_state)
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
