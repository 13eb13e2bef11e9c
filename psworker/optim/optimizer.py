"""The torch optimizer of a job: scripts use it like any other, and the servers run its steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from os import PathLike
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from pscommon.core.errors import FencedError, InvalidRequestError, PSError, error_for
from pscommon.telemetry.logs import get_logger
from psworker.core.results import PushResult, lost
from psworker.model.adapter import ModelAdapter
from psworker.model.saving import save
from psworker.optim.accumulation import GradientAccumulation
from psworker.optim.checks import check_own_step, checked_weight, refuse_copy
from psworker.optim.grad_scaling import unscale
from psworker.optim.optimizer_state import StateOnServers, check_unused
from psworker.optim.param_groups import GroupSettings
from psworker.optim.step import Push, StepContext
from psworker.optim.step_strategies import STEP_STRATEGIES, StepStrategyName
from psworker.session.arguments import clip_norm_of
from psworker.session.drain import DrainedError
from psworker.session.session import Session

P = ParamSpec("P")

log = get_logger(__name__)

STATE_DICT_KEY = "paramserver"


def _step_of_torch(function: Callable[P, Any]) -> Callable[P, Any]:
    """Run torch's hooks around a step, unless GradScaler leaves it out; never compile it.

    A compiled step would be a trace through the client.
    """
    hooked = torch.optim.Optimizer.profile_hook_step(function)

    @wraps(function)
    def step(*args: P.args, **kwargs: P.kwargs) -> Any:
        optimizer: Any = args[0]
        return optimizer._leave_out() if optimizer.found_inf else hooked(*args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # so torch does not do it again
    plain: Callable[P, Any] = torch._disable_dynamo(step)  # type: ignore[attr-defined]
    return plain


class ServerOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps run on the servers. `Job.optimizer` creates it.

    It shares parameter groups and hooks with the script's optimizer, and LR schedulers work on
    either: the values in the groups travel with the next step. The servers hold the optimizer
    state (moments); `state` here has no entries.

    Attributes:
        result: PushResult of the last step that was decided; None before the first. Status
            "applied" or "duplicate": it counted. "stale": the policy found the gradient too
            old, or the worker lost its membership and has rejoined (reason FENCED); then its
            batches went back, and the model holds the job's newest weights.
        pending: The last step only added its gradient to an update of several batches
            (`--global-batch`): it sent nothing, `result` belongs to the update before, and a
            scheduler that steps with every update must not step.
    """

    _step_supports_amp_scaling = True
    """GradScaler always calls step(), and sets `found_inf` where there must be no step."""

    found_inf: Tensor | float = 0.0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        session: Session,
        strategy: StepStrategyName = "plain",
        clip_norm: float | None = None,
    ) -> None:
        check_unused(optimizer.state)
        check_own_step(optimizer)
        self._adapter = adapter = ModelAdapter(model, optimizer, clip_norm_of(clip_norm))
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, StateOnServers()
        vars(self).update(
            {name: hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")}
        )
        self.result: PushResult | None = None
        self.pending = False
        self._group_settings = GroupSettings(optimizer)
        self._session = session
        self._groups_on_servers = ""  # as JSON; empty: unknown
        self._must_leave = False
        client, strategy_class = session.client, STEP_STRATEGIES[strategy]
        plan = session.with_rejoin(lambda: client.agree(adapter.spec))
        adapter.attach(plan, client.flat_buffers(), double_buffered=strategy_class.is_deferred)
        session.with_rejoin(lambda: client.start(adapter.weights.memory))
        adapter.scatter(everything=True)
        self._accumulation = GradientAccumulation(adapter.trainable.tensors)
        self._strategy = strategy_class(
            StepContext(
                adapter,
                client,
                model,
                session.enter,
                self._rejoin_in_forward,
                self.wait,
                self._record_outcome,
            )
        )
        self._original = optimizer
        self._original_hook = optimizer.register_step_pre_hook(_refuse_original)

    @property
    def grad_scale(self) -> Tensor:
        """The scale of GradScaler. Setting it divides the gradients at once, before hooks run."""
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, scale: Tensor | None) -> None:
        if scale is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            unscale([p.grad for p in parameters if p.grad is not None], scale)

    @grad_scale.deleter
    def grad_scale(self) -> None:
        pass

    @_step_of_torch
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Send the gradients, wait for the policy's decision, and load the newest weights.

        A parameter whose grad is None stays as it is on all servers. In a script that uses
        `job.batches`, a step without a gradient and without a new batch does nothing. The
        samples of a step that GradScaler leaves out weigh nothing later.

        Args:
            closure: Evaluates the model and returns the loss, as in torch.
            samples: Weight of this gradient in the average of a round. Default: the samples in
                the batches since the last step; 1 without `job.batches`.

        Returns:
            The loss that `closure` returned, else None.

        Raises:
            NonFiniteError: A gradient has NaN or Inf; no server has changed anything. With
                `--bad-gradients skip` a warning instead, and status "rejected" in `result`.
            InvalidRequestError: The model was moved or cast since `job.optimizer`.
            Stopping: This worker was asked to leave, or the job ended, and the step in progress
                was the last one.
            PSError: Any error of the connection.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # where LR schedulers that were created with the original optimizer look
        self._original._opt_called = True  # type: ignore[attr-defined]
        self._push(samples)
        return loss

    def _leave_out(self) -> None:
        """Drop the gradients of a step that GradScaler leaves out.

        In a `--global-batch` they count as zero.
        """
        if self._session.consumed.shared:
            self.zero_grad()
            self._push(None)
        else:
            self._session.consumed.samples = 0
            self._strategy.skip()

    @torch.no_grad()
    def _push(self, samples: int | None) -> None:
        session, consumed = self._session, self._session.consumed
        groups = self._group_settings.groups_json(self.param_groups)
        weight = max(1, consumed.samples) if samples is None else checked_weight(samples)
        if consumed.nothing and not self.has_gradients:
            return self._strategy.skip()
        self._check_leaving()
        self.pending = consumed.following > 0 and consumed.lost is None
        if self.pending:
            return self._accumulate(weight)
        session.enter("push")
        # A deferred step does not know yet whether the groups of the push before have counted.
        is_known = groups == self._groups_on_servers and not self._strategy.is_deferred
        push = Push(self._accumulation.finish(weight), consumed.batches, "" if is_known else groups)
        result = self._send(push)
        push = replace(push, batches=consumed.batches)  # without those of a lost membership
        self.result = result or self.result
        consumed.clear()
        session.finish_step(push.samples, self.result.seconds if self.result else {})
        if result is not None:
            self._record_outcome(push, result)
        return None

    def _accumulate(self, samples: int) -> None:
        self._accumulation.add(samples)
        self._session.consumed.samples = 0
        self._strategy.skip()

    def _check_leaving(self) -> None:
        """Raise Stopping in the second step after the request to leave: the first was begun."""
        if self._must_leave:
            self._session.check_stopping()
        self._must_leave = self._session.client.stopping

    def _send(self, push: Push) -> PushResult | None:
        session = self._session
        if session.consumed.lost is not None:
            self._strategy.skip()
            return lost(session.consumed.lost, session.version)
        try:
            result = self._strategy.push(push)
        except DrainedError as error:
            session.stop(str(error), "drained")
        except FencedError as error:
            session.rejoin(error)
            return lost(error, session.version)
        session.reset_rejoin_count()
        return result

    def _record_outcome(self, push: Push, result: PushResult) -> None:
        self.result = result
        if result.status == "rejected":
            self._reject(result.reason)
        if result.status == "stale":
            self._session.stats.stale += 1
            with suppress(FencedError):  # then they have gone back already
                self._session.client.return_batches(push.batches)
            if not result.lost:
                log.warning(
                    "push_stale", staleness=result.staleness, returned_batches=len(push.batches)
                )
        else:
            self._groups_on_servers = push.groups_json or self._groups_on_servers

    def _reject(self, why: str) -> None:
        if self._session.client.bad_gradients != "skip":
            reason, _, detail = why.partition(": ")
            raise error_for(reason, detail)
        self._session.stats.rejected += 1
        log.warning("step_skipped", reason=why)

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return self._adapter.has_gradients

    @torch.no_grad()
    def pull(self) -> None:
        """Load the job's newest weights and buffers into the model, without a step."""
        with self._session.rejoin_on_fence():
            self._strategy.pull()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait as `Job.wait` does."""
        with self._session.rejoin_on_fence():
            self._strategy.settle()

    @contextmanager
    def _rejoin_in_forward(self) -> Iterator[None]:
        """Leave the body when the worker is fenced inside a forward, and rejoin.

        The first modules of that forward have used older weights than the rest will, so its
        gradients are void.
        """
        try:
            yield
        except DrainedError as error:
            self._session.stop(str(error), "drained")
        except FencedError as error:
            self._session.rejoin(error)
            self._session.consumed.lose(error)

    def save(self, file: str | PathLike[str]) -> None:
        """Write the weights as `Job.save` does."""
        self.wait()
        save(self._session.client, self._adapter, file)

    def drop(self, error: PSError) -> None:
        """End or drop a push under way: the worker has lost its membership with this error."""
        self._accumulation.clear()
        self._strategy.drop(error)

    @torch.no_grad()
    def renew(self) -> None:
        """Load all of the job's weights: the worker has a new membership."""
        self._groups_on_servers = ""
        self._strategy.renew()

    def close(self) -> None:
        """Remove all hooks: the model belongs to the script, as it is now."""
        self._original_hook.remove()
        self._strategy.close()

    @property
    def _is_copy(self) -> bool:
        """Whether deepcopy or pickle made this object, as for a deep copy of a scheduler."""
        return "_session" not in vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._is_copy:
            self.register_step_pre_hook(refuse_copy)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Only torch's constructor may: the servers cannot add parameters later."""
        if hasattr(self, "_strategy"):
            raise InvalidRequestError(
                "the parameters of a job are fixed. Try: give the optimizer all of them before "
                "job.optimizer, and switch requires_grad"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the hyper-parameters, with the job and the version that they belong to.

        Moments are in the servers' snapshots.
        """
        if self._is_copy:
            return super().state_dict()
        self.wait()
        return super().state_dict() | {
            STATE_DICT_KEY: {"job": self._session.client.job, "version": self._session.version}
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the hyper-parameters; they travel with the next step.

        To continue a job, resume the servers' snapshot. To drop the moments of a plain torch
        optimizer on purpose, load `{**state_dict, "state": {}}`.

        Raises:
            InvalidRequestError: The state_dict belongs to a plain torch optimizer that has made
                steps. The servers cannot load its moments.
        """
        check_unused(state_dict["state"])
        shared = self.param_groups
        super().load_state_dict({**state_dict, "state": {}})
        for mine, loaded in zip(shared, self.param_groups, strict=True):
            mine.update(loaded, params=mine["params"])
        self.param_groups, self.state = shared, StateOnServers()


def _refuse_original(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise InvalidRequestError in a step of the script's optimizer.

    It would change this worker's copy of the weights only.
    """
    if not isinstance(optimizer, ServerOptimizer):  # the two share their hooks
        raise InvalidRequestError(
            "this optimizer was given to the job. Try: call step() of the optimizer that "
            "job.optimizer(...) returned, which takes its place"
        )
