"""`DistributedTraining`: train a model on several workers and servers with one call."""

import contextlib
import os
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pscommon.core.errors import InvalidRequestError
from pscommon.optim import KINDS
from pscommon.settings.environment import without_settings
from pscommon.telemetry.logs import get_logger
from psworker.client.client import Client
from psworker.connect import choose_device
from psworker.data.random_state import preserved_generators
from psworker.local_servers import local_servers
from psworker.session.arguments import check_integer
from psworker.training_nodes import (
    Loss,
    MakeOptimizer,
    TrainingCluster,
    TrainingNode,
    TrainingTask,
    copy_state,
    train_nodes,
)

log = get_logger(__name__)


class DistributedTraining:
    """Trains a model on several workers and servers with one call.

    Servers that it starts accept only this process. For running servers with TLS or tokens,
    PS_TLS_CA, PS_TLS_CERT, PS_TLS_KEY, PS_TOKEN_FILE and PS_INSECURE count as for
    `psworker.connect`.

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
        optimizer: MakeOptimizer | Optimizer | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        simulate: bool = False,
        clip_norm: float | None = None,
    ) -> dict[str, Any]:
        """Train a model and return the results.

        Each worker is a thread of this process, with its own copy of the model and its own
        connections. The servers are processes; no PS_<FLAG> in the environment applies to them.
        Each sample is used once per epoch, by one of the workers.

        Args:
            model: A module, which gets the trained weights, or "package.module:function" that
                makes one. Its mode, train() or eval(), does not change.
            data: A map-style dataset of (input, target), or a pair of tensors. An input or target
                may be a dict, list or tuple of tensors; the model is called with the input as it
                is.
            nodes: Number of workers.
            use_gpus: Compute on CUDA devices, which the workers take in turn.
            epochs: Passes over the data.
            batch_size: Samples per batch and worker.
            loss: loss(output, target). Default: cross entropy for integer targets, otherwise mean
                squared error. It must not use parameters of the given model: workers train copies.
            optimizer: A function that makes an optimizer from parameters, or an optimizer whose
                settings are used. Default: Adam.
            shuffle: A new order in each epoch.
            seed: Seed of the order.
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
        nodes = check_integer("nodes", nodes, 1)
        if simulate and self.ps is not None:
            raise InvalidRequestError(
                f"simulate=True excludes ps={self.ps!r}: it makes its servers. Try: leave out ps"
            )
        module = _make_module(model)
        task = TrainingTask(
            _check_data(data),
            epochs,
            batch_size,
            _check_loss(loss),
            _optimizer_maker(optimizer, module),
            shuffle,
            seed,
            clip_norm,
        )
        devices = [choose_device("cuda" if use_gpus else "cpu", node) for node in range(nodes)]
        began = time.monotonic()
        run = self._simulated if simulate else self._real
        with run(nodes) as cluster, preserved_generators(), _refuse_gradients_of(module):
            results = train_nodes(cluster, task, module, devices)
        if self.ps is not None and not any(node.steps for node in results):
            log.warning(
                "nothing_trained",
                servers=self.ps,
                problem="the job had trained on all its data before; a job is one training",
                remedy="start other servers for another training",
            )
        return {
            "model_name": type(module).__name__,
            "nodes_used": nodes,
            "device": str(devices[0]),
            "seconds": time.monotonic() - began,
            **_summarize(module, results),
        }

    @contextlib.contextmanager
    def _real(self, nodes: int) -> Iterator["TrainingCluster"]:
        if self.ps is not None:
            yield TrainingCluster(lambda node: Client(self.ps, rank=node))
            return
        # settings in the environment (a data directory, a port) are meant for another job
        environ = without_settings(os.environ)
        with local_servers(self.servers, nodes, self.policy, self.staleness, environ) as address:
            yield TrainingCluster(lambda node: Client(address, rank=node))

    @contextlib.contextmanager
    def _simulated(self, nodes: int) -> Iterator["TrainingCluster"]:
        from psworker.simulation import DirectTransport, simulated

        cluster = simulated(self.servers, nodes, self.policy, self.staleness)
        yield TrainingCluster(
            lambda node: Client(lane=DirectTransport(cluster, node), rank=node),
            cluster.turns.enter,
            cluster.turns.leave,
        )


def _make_module(model: nn.Module | str) -> nn.Module:
    """Return the model, or the result of the function that "package.module:function" names."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, str):
        raise InvalidRequestError(
            f"model cannot be a {type(model).__name__}. Try: a torch.nn.Module, or "
            '"package.module:function"'
        )
    name, _, function = model.partition(":")
    try:
        if not name or not function:
            raise ImportError("module or function is missing")
        make = getattr(import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(
            f'model {model!r} is not valid: {error}. Try: "package.module:function"'
        ) from error
    module = make()
    if not isinstance(module, nn.Module):
        raise InvalidRequestError(
            f"{model} made a {type(module).__name__}. Try: a function that returns a "
            "torch.nn.Module"
        )
    return module


def _check_data(data: Any) -> Any:
    """Return the data set; a list of two tensors becomes a tuple, which has rows."""
    if isinstance(data, DataLoader):
        raise InvalidRequestError(
            "data cannot be a DataLoader: each node makes its own batches. Try: its data set "
            "(loader.dataset), with batch_size and shuffle as arguments"
        )
    is_list = isinstance(data, list) and data and all(isinstance(item, Tensor) for item in data)
    if not is_list and not isinstance(data, tuple):
        return data
    if len(data) != 2:
        raise InvalidRequestError(
            f"data has {len(data)} tensors. Try: a pair of tensors (inputs, targets), or a data set"
        )
    return tuple(data)


def _optimizer_maker(
    optimizer: MakeOptimizer | Optimizer | None, module: nn.Module
) -> MakeOptimizer:
    """Return a function that makes the optimizer of a node from the parameters of its model.

    Args:
        optimizer: Such a function, an optimizer over parameters of `module` whose settings are
            used, or None for Adam.
        module: The model that the nodes copy.
    """
    if optimizer is None:
        return torch.optim.Adam
    if not isinstance(optimizer, Optimizer):
        return _checked_maker(optimizer)
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    groups = [
        (
            {key: value for key, value in group.items() if key != "params"},
            [numbers.get(id(p)) for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]
    if any(number is None for _, members in groups for number in members):
        raise InvalidRequestError(
            "the optimizer has parameters that are not the model's. Try: make it from "
            "model.parameters()"
        )
    kinds = [kind for kind in KINDS.values() if kind.torch_class is type(optimizer)]
    arguments = {key: optimizer.defaults[key] for kind in kinds for key in kind.constructor_only}

    def make(parameters: Any) -> Optimizer:
        copied = list(parameters)
        optimizer_class: Any = type(optimizer)
        copied_groups = [
            settings | {"params": [copied[number] for number in members if number is not None]}
            for settings, members in groups
        ]
        result: Optimizer = optimizer_class(copied_groups, **arguments)
        return result

    return make


def _checked_maker(make: MakeOptimizer) -> MakeOptimizer:
    remedy = "Try: a torch.optim optimizer, or a function that makes one, such as torch.optim.SGD"
    if not callable(make):
        raise InvalidRequestError(f"optimizer cannot be {make!r}. {remedy}")

    def checked(parameters: Any) -> Optimizer:
        optimizer: Any = make(parameters)
        if not isinstance(optimizer, Optimizer):
            raise InvalidRequestError(f"optimizer made a {type(optimizer).__name__}. {remedy}")
        return optimizer

    return checked


def _check_loss(loss: Loss | None) -> Loss:
    """Return the loss, or the default one for None."""
    if loss is None:
        return _default_loss
    if isinstance(loss, type) or not callable(loss):
        raise InvalidRequestError(
            f"loss cannot be {loss!r}. Try: a function of output and target, such as "
            "torch.nn.MSELoss()"
        )
    return loss


def _default_loss(output: Any, target: Any) -> Tensor:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        raise InvalidRequestError(
            f"there is no default loss for a {type(output).__name__} and a "
            f"{type(target).__name__}. Try: loss=..., or a model and targets that are tensors"
        )
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target)
    return nn.functional.cross_entropy(output, target)


@contextlib.contextmanager
def _refuse_gradients_of(model: nn.Module) -> Iterator[None]:
    """Refuse a loss that uses parameters of the given model, such as a penalty.

    Workers train copies, so these parameters would never change.
    """
    trainable = [p for p in model.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]
    hooks = [parameter.register_hook(_refuse_gradient) for parameter in trainable]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_gradient(gradient: Tensor) -> None:
    raise InvalidRequestError(
        "loss(output, target) uses parameters of the given model, but each node trains a copy of "
        "it. Try: let the model return what the loss needs, and penalize weights with the "
        "optimizer's weight_decay"
    )


def _summarize(module: nn.Module, results: list[TrainingNode]) -> dict[str, Any]:
    """Return the results of all nodes, and load the weights of a finished one into the module."""
    finished = [node for node in results if not node.is_stopped]
    states = (node.state for node in [*finished, *results] if node.state)
    newest = next(states, None) or copy_state(module)
    module.load_state_dict(newest)
    losses = [node.loss for node in results if node.steps]
    return {
        "status": "done" if finished else "stopped",
        "steps": sum(node.steps for node in results),
        "samples": sum(node.samples for node in results),
        "final_loss": sum(losses) / len(losses) if losses else float("nan"),
        "state_dict": newest,
    }
