"""The torch optimizer of a job: scripts use it like any other, and the servers run its steps."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pscommon.core.errors import FencedError, InvalidRequestError, PSError, error_for
from pscommon.telemetry.logs import get_logger
from psworker.core.results import PushResult, lost
from psworker.model.gradient_watch import GradientWatch
from psworker.optim.gradients import GradientAccumulation, unscale
from psworker.optim.served_model import ServedModel
from psworker.optim.torch_optimizer import (
    STATE_DICT_KEY,
    GroupSettings,
    StateOnServers,
    check_own_step,
    check_same_job,
    check_unused,
    checked_weight,
    refuse_copy,
)
from psworker.session.drain import DrainedError
from psworker.session.session import Session
from psworker.steps.step import PlainStep, Push

P = ParamSpec("P")

log = get_logger(__name__)


def _step_of_torch(function: Callable[P, Any]) -> Callable[P, Any]:
    """Run torch's hooks around a step, unless GradScaler leaves it out; never compile it.

    A compiled step would be a trace through the client.
    """
    without_hooks: Any = function
    hooked = torch.optim.Optimizer.profile_hook_step(function)

    @wraps(function)
    def step(*args: P.args, **kwargs: P.kwargs) -> Any:
        optimizer: Any = args[0]
        if not optimizer._is_left_out():
            return hooked(*args, **kwargs)
        weight = optimizer._leave_out()
        return without_hooks(optimizer, samples=weight) if weight else None

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
        name: Name in the job; empty if it has none.
        original: The script's optimizer.
        model: The registered model; None before.
        watch: Watches the gradients.
        is_reduced: Gradients are the mean over a group's ranks before `step`.
        first_count: Number of its updates in the job when this worker registered the model; 0
            before. Of an optimizer without a name, the job's version then.
    """

    _step_supports_amp_scaling = True
    """GradScaler always calls step(), and sets `found_inf` where there must be no step."""

    found_inf: Tensor | float = 0.0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str,
        session: Session,
        register: Callable[[], None],
    ) -> None:
        check_unused(optimizer.state)
        check_own_step(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, StateOnServers()
        vars(self).update(
            {name: hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")}
        )
        self.result: PushResult | None = None
        self.pending = False
        self.name = name
        self.original = optimizer
        self.model: ServedModel | None = None
        self.first_count = 0
        self._register = register
        self._counts_samples = True
        self._group_settings = GroupSettings(optimizer)
        self._session = session
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self.watch = GradientWatch(self._parameters)
        self._next = session.consumed.new_step(self.watch)
        self.is_reduced = False
        self._must_leave = False
        self._accumulation = GradientAccumulation(self._parameters)
        self._original_hook: RemovableHandle | None = None

    def attach(self, model: ServedModel, counts_samples: bool) -> None:
        """Use the registered model from now on.

        counts_samples: The samples of these steps count for the worker's throughput. Those of one
            optimizer do: each of several optimizers goes through all samples.
        """
        self.model, self._counts_samples = model, counts_samples
        counted = model.update_counts.get(self.name, 0)
        self.first_count = counted if self.name else model.first_version

    def refuse_original(self) -> None:
        """Refuse steps of the script's optimizer from now on."""
        self._original_hook = self.original.register_step_pre_hook(_refuse_original)

    def void_gradients(self) -> None:
        """Let the next step not count if there are gradients: they are of other weights."""
        if self.watch.has_gradients():
            self._next.lost = PSError(
                "the gradient was computed before this worker had the job's weights. Try: "
                "job.pull() before the first forward pass",
                "STALE",
            )

    @property
    def grad_scale(self) -> Tensor:
        """The scale of GradScaler. Setting it divides the gradients at once, before hooks run."""
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, scale: Tensor | None) -> None:
        if scale is not None:
            unscale([p.grad for p in self._parameters if p.grad is not None], scale)

    @grad_scale.deleter
    def grad_scale(self) -> None:
        pass

    @_step_of_torch
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Send the gradients, wait for the policy's decision, and load the newest weights.

        A parameter whose grad is None stays as it is on all servers. In a script that uses
        `job.batches`, a step without a gradient and without a new batch does nothing. The
        samples of a step that GradScaler leaves out weigh nothing later.

        Args:
            closure: Evaluates the model and returns the loss, as in torch.
            samples: Weight of this gradient in the average of a round. Default: the samples of
                the batches since the last step that have added a gradient; 1 without
                `job.batches`. Give it if `collate_fn` leaves samples out.

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
        with torch.enable_grad():
            if self.model is None:
                self._register()
            if closure is not None:
                loss = closure()
        # where LR schedulers that were created with the original optimizer look
        self.original._opt_called = True  # type: ignore[attr-defined]
        session, consumed, step = self._session, self._session.consumed, self._next
        groups = self._group_settings.groups_json(self.param_groups)
        if samples is not None and self.is_reduced:
            raise InvalidRequestError(
                "step(samples=...) comes too late: DistributedDataParallel and fully_shard weigh "
                "the ranks in backward. Try: leave it out, or the plain model"
            )
        weight = self._weigh() if samples is None else checked_weight(samples)
        if consumed.has_none_for(step) and not self.watch.has_gradients():
            self._step_strategy.skip()
            return loss
        self._check_leaving()
        self.pending = consumed.following > 0 and step.lost is None
        if self.pending:
            self._accumulate(weight)
            return loss
        session.enter("push")
        push = Push(self._accumulation.finish(weight), consumed.batches, groups, self.name)
        result: PushResult | None = None
        if step.lost is not None:
            self._step_strategy.skip()
            result = lost(step.lost, session.version)
        else:
            try:
                result = self._step_strategy.push(push)
                session.reset_rejoin_count()
            except DrainedError as error:
                session.stop(str(error), "drained")
            except FencedError as error:
                session.rejoin(error)
                result = lost(error, session.version)
        push = replace(push, batches=consumed.batches)  # without those of a lost membership
        consumed.finish_push(step)
        last = result or self.result
        session.finish_step(
            push.samples if self._counts_samples else 0, last.seconds if last else {}
        )
        if result is not None:
            self.record_outcome(push, result)
        return loss

    def _is_left_out(self) -> bool:
        """Return whether GradScaler leaves this step out, on any rank of the group."""
        if not isinstance(self.found_inf, Tensor):
            return False
        return any(self._session.client.model.each_rank(bool(self.found_inf)))

    def _leave_out(self) -> int:
        """Drop the gradients of a step that GradScaler leaves out.

        Returns:
            The weight of a step without gradients that has to follow; 0: none has. In a
            `--global-batch` they count as zero.
        """
        if self.model is None:
            self._register()
        if self._session.consumed.shared:
            weight = self._weigh()
            self.zero_grad()
            return weight
        self._next.finish()
        self._step_strategy.skip()
        return 0

    def _weigh(self) -> int:
        """Return the weight of the gradients: 0 on a rank whose batches have no own samples."""
        step = self._next
        least = 0 if step.has_batches and not step.samples else 1
        return max(least, self._session.consumed.weigh(step))

    def share(self) -> float:
        """Return the part of this rank in the samples since the last step, of all ranks."""
        step, place = self._next, self._session.client.place
        return step.samples / step.all_samples if step.all_samples else 1 / place.size

    @property
    def _step_strategy(self) -> PlainStep:  # Lightning sets `_strategy` on its subclass
        assert self.model is not None
        return self.model.strategy

    def _accumulate(self, samples: int) -> None:
        if self.is_reduced:
            raise InvalidRequestError(
                "`--global-batch` cannot add up gradients that DistributedDataParallel or "
                "fully_shard has reduced. Try: the plain model in this group, or one batch per "
                "update"
            )
        self._accumulation.add(samples)
        self._next.forget_samples()
        self._next.is_open = True
        self._step_strategy.skip()

    def _check_leaving(self) -> None:
        """Raise Stopping in the second step after the request to leave: the first was begun."""
        if self._must_leave:
            self._session.check_stopping()
        self._must_leave = self._session.client.stopping

    def record_outcome(self, push: Push, result: PushResult) -> None:
        """Take the outcome of a push."""
        assert self.model is not None
        self.result = self.model.result = result
        if result.status == "rejected":
            self._reject(result.reason)
        if result.status == "stale":
            self._session.stats.stale += 1
            with suppress(FencedError):  # then they have gone back already
                self._session.client.data.return_batches(push.batches)
            if not result.lost:
                log.warning(
                    "push_stale",
                    staleness=result.staleness,
                    returned_batches=len(push.batches),
                    reason=result.reason,
                )

    def _reject(self, why: str) -> None:
        if self._session.client.bad_gradients != "skip":
            reason, _, detail = why.partition(": ")
            raise error_for(reason, detail)
        self._session.stats.rejected += 1
        log.warning("step_skipped", reason=why)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as in torch. Batches that they came from weigh nothing later."""
        super().zero_grad(set_to_none)
        if not self._is_copy:
            self._session.consumed.drop_gradients(self._next)

    def drop(self, error: PSError) -> None:
        """Drop gradients of a membership that was lost with this error."""
        self._accumulation.clear()
        # ConsumedBatches knows which steps of a script with passes are void
        if self.name and self.watch.has_gradients() and not self._session.consumed.dealt:
            self._next.lost = error

    def close(self) -> None:
        """Remove the hooks of the parameters and of the script's optimizer."""
        self.watch.close()
        if self._original_hook is not None:
            self._original_hook.remove()

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
        if hasattr(self, "_session"):
            raise InvalidRequestError(
                "the parameters of a job are fixed. Try: give the optimizer all of them before "
                "job.optimizer, and switch requires_grad"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the hyper-parameters, with the job and the version that they belong to.

        Moments are in the servers' snapshots, not here.
        """
        if self._is_copy:
            return super().state_dict()
        if self.model is not None:
            self.model.wait()
        job, version = self._session.client.job, self._session.version
        origin = {"job": job, "training": self._session.training, "version": version}
        return super().state_dict() | {STATE_DICT_KEY: origin}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the hyper-parameters; they travel with the next step.

        To continue a job, resume the servers' snapshot. To drop the moments on purpose, load the
        state_dict without its key "paramserver"; of a plain torch optimizer, load
        `{**state_dict, "state": {}}`.

        Raises:
            InvalidRequestError: The state_dict belongs to an optimizer that has made steps
                elsewhere: a plain torch optimizer, or one of another job. The servers do not have
                its moments.
        """
        check_unused(state_dict["state"])
        if not self._is_copy:
            session = self._session
            knows_version = self.model is not None or session.policy == "local"
            is_new = knows_version and not session.version
            here = {"job": session.client.job, "training": session.training}
            check_same_job(state_dict, here, is_new, self.original)
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
