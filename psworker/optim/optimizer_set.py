"""The optimizers of a script, and the registration of its model."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import Treatment
from psworker.model.adapter import ModelAdapter
from psworker.model.flat_buffer import local_part
from psworker.model.model_spec import OptimizerMembers
from psworker.optim.optimizer import ServerOptimizer
from psworker.optim.served_model import ServedModel, StepStrategyName
from psworker.session.arguments import clip_norm_of
from psworker.session.session import Session
from psworker.steps.step import Adapter

MakeAdapter = Callable[[nn.Module, Mapping[str, OptimizerMembers]], Adapter]

DEFAULT_NAME = "default"
"""Name of an optimizer that must be the only one of its job."""


class OptimizerSet:
    """The optimizers that a script gives to its job.

    An optimizer without a name of its own registers its model at once. Several optimizers are for
    disjoint parameters; their models are registered together, as one, when the script first needs
    the job's weights.

    Attributes:
        model: The registered model; None before.
    """

    def __init__(self) -> None:
        self.model: ServedModel | None = None
        self._optimizers: dict[str, ServerOptimizer] = {}
        self._networks: dict[str, nn.Module] = {}
        self._members: dict[str, OptimizerMembers] = {}
        self._resumed: list[LRScheduler] = []
        self._make_adapter: MakeAdapter = ModelAdapter

    def add(
        self,
        session: Session,
        name: str,
        optimizer: torch.optim.Optimizer,
        network: nn.Module,
        clip_norm: float | None,
        buffers: Mapping[str, Treatment] | None,
        strategy: StepStrategyName,
        make_adapter: MakeAdapter,
    ) -> ServerOptimizer:
        """Add an optimizer and the network whose parameters it updates; see `Job.optimizer`.

        make_adapter: Makes the adapter of a network and its optimizers.
        """
        is_single = name == DEFAULT_NAME
        self._check_name(session, name)
        key = "" if is_single else name
        networks = {**self._networks, key: network}
        members = {
            **self._members,
            key: OptimizerMembers.of(optimizer, clip_norm_of(clip_norm), buffers),
        }
        _check_disjoint(members)
        self._make_adapter = make_adapter
        adapter = make_adapter(_joined(networks), members)
        register = partial(self._register_for_step, session)
        added = ServerOptimizer(optimizer, key, session, register)
        if is_single:
            self._register(session, network, adapter, {key: added}, strategy)
        self._networks, self._members = networks, members
        self._optimizers[key] = added
        added.refuse_original()
        return added

    def register(self, session: Session) -> None:
        """Register the model of several optimizers; without one, do nothing."""
        if not self._networks:
            return
        # the script may have changed the networks since the calls of job.optimizer
        module = _joined(self._networks)
        adapter = self._make_adapter(module, self._members)
        self._register(session, module, adapter, self._optimizers, "plain")

    def _register_for_step(self, session: Session) -> None:
        """Register the model. Gradients of weights that this changes do not count."""
        parameters = [p for network in self._networks.values() for p in network.parameters()]
        before = [local_part(parameter).clone() for parameter in parameters]
        self.register(session)
        are_equal = all(map(torch.equal, map(local_part, parameters), before))
        if any(session.client.model.each_rank(not are_equal)):
            for optimizer in self._optimizers.values():
                optimizer.void_gradients()

    def _register(
        self,
        session: Session,
        module: nn.Module,
        adapter: Adapter,
        optimizers: Mapping[str, ServerOptimizer],
        strategy: StepStrategyName,
    ) -> None:
        model = ServedModel(session, module, adapter, optimizers, strategy)
        for name, optimizer in optimizers.items():
            optimizer.attach(model, counts_samples=name == min(optimizers))
        self.model = session.model = model
        for scheduler in self._resumed:
            self.resume(scheduler)

    def resume(self, scheduler: LRScheduler) -> None:
        """Step a new scheduler as often as its optimizer has, now or at the registration."""
        fast_forward(scheduler, 0)  # refuses some classes
        optimizer = self._optimizer_of(scheduler)
        if optimizer.model is None:
            self._resumed.append(scheduler)
        else:
            fast_forward(scheduler, optimizer.first_count)

    def _optimizer_of(self, scheduler: LRScheduler) -> ServerOptimizer:
        for name, optimizer in self._optimizers.items():
            if not name or scheduler.optimizer in (optimizer, optimizer.original):
                return optimizer
        raise InvalidRequestError(
            "job.resume failed: the scheduler's optimizer was not given to the job. Try: call "
            "job.optimizer first"
        )

    def close(self) -> None:
        """Remove all hooks: the model belongs to the script, as it is now."""
        for optimizer in self._optimizers.values():
            optimizer.close()
        if self.model is not None:
            self.model.strategy.close()

    def _check_name(self, session: Session, name: Any) -> None:
        if self.model is not None and session.has_begun:
            raise InvalidRequestError(
                "job.optimizer failed: training has begun with other optimizers. Try: at the "
                "start, list all parameters and switch requires_grad and lr later; or begin a "
                "training: job.close(), then psworker.connect()"
            )
        if "" in self._optimizers or (name == DEFAULT_NAME and self._optimizers):
            raise InvalidRequestError(
                "job.optimizer failed: an optimizer without a name is the only one of its job. "
                'Try: a name for each, such as job.optimizer(..., name="generator")'
            )
        if name == DEFAULT_NAME:
            return
        if not isinstance(name, str) or not name or "." in name:
            raise InvalidRequestError(
                f"job.optimizer failed: {name!r} is no valid name. Try: a text without dots"
            )
        if name in self._optimizers:
            raise InvalidRequestError(
                f"job.optimizer failed: the job has an optimizer {name!r} already. Try: another "
                "name"
            )
        if self.model is not None:
            raise InvalidRequestError(
                f"job.optimizer failed: {name!r} comes too late: the first pull or save has "
                "registered the model. Try: all calls of job.optimizer before it"
            )


def fast_forward(scheduler: LRScheduler, steps: int) -> None:
    """Step a fresh scheduler `steps` times.

    Raises:
        InvalidRequestError: The scheduler depends on measured values, which no job keeps.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidRequestError(
            "ReduceLROnPlateau depends on measured values, which no job keeps. Try: save and load "
            "its state_dict()"
        )
    with warnings.catch_warnings():
        # torch expects steps of the optimizer, which earlier workers have made
        warnings.filterwarnings(
            "ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before"
        )
        for _ in range(steps):
            scheduler.step()


def _joined(networks: Mapping[str, nn.Module]) -> nn.Module:
    """Return one module: the parameters of network "d" are named "d....".

    The network of a single optimizer keeps its names.
    """
    if "" in networks:
        return networks[""]
    joined = nn.Module()
    joined._modules.update(sorted(networks.items()))  # ModuleDict refuses some names
    return joined


def _check_disjoint(optimizers: Mapping[str, OptimizerMembers]) -> None:
    """Raise InvalidRequestError if two optimizers have a parameter in common."""
    owners: dict[int, str] = {}
    for name, each in optimizers.items():
        for index, group in enumerate(each.groups):
            for parameter in group:
                owner = owners.setdefault(id(parameter), name)
                if owner != name:
                    raise InvalidRequestError(
                        f"job.optimizer failed: a parameter of shape {list(parameter.shape)} in "
                        f"group {index} of optimizer {name!r} belongs to optimizer {owner!r}, "
                        "too. Try: each parameter in one optimizer"
                    )
