"""The torch optimizer that a script holds: it looks like any other, and its steps happen on the
servers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from itertools import groupby
from operator import index
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
from psworker.optim.overlapped_step import OverlappedStep
from psworker.optim.param_groups import GroupSettings
from psworker.optim.pipelined_step import PipelinedStep
from psworker.optim.step import Push, StepStrategy
from psworker.session.arguments import clip_norm_of
from psworker.session.drain import DrainedError
from psworker.session.session import Session

P = ParamSpec("P")

log = get_logger(__name__)

MARK = "paramserver"


class StateOnServers(defaultdict[Any, Any]):
    """An optimizer's state that is there, but not here. Not false: torch.distributed.checkpoint
    makes state where it finds none, by a step with gradients of zero, which the servers would
    count.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def _step_of_torch(made: Callable[P, Any]) -> Callable[P, Any]:
    """With hooks, unless GradScaler leaves the step out; and not compiled, or a trace would go
    through the client.
    """
    hooked = torch.optim.Optimizer.profile_hook_step(made)

    @wraps(made)
    def step(*args: P.args, **kwargs: P.kwargs) -> Any:
        optimizer: Any = args[0]
        return optimizer._leave_out() if optimizer.found_inf else hooked(*args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # so torch does not do it again
    plain: Callable[P, Any] = torch._disable_dynamo(step)  # type: ignore[attr-defined]
    return plain


class ServerOptimizer(torch.optim.Optimizer):
    """Takes the place of `optimizer`, whose class, hyper-parameters and parameter groups the
    servers carry out.

    Made by `Job.optimizer`, where overlap and pipeline are described. Groups and hooks are
    shared with `optimizer`, and LR schedulers work on either: what stands in the groups travels
    with the next step. Optimizer state (moments) lives on the servers, `state` here has no
    entries.

    result: PushResult of the last step that has been decided, None before the first. status
    "applied" or "duplicate": it counted; "stale": the policy found the gradient too old, or the
    job had gone on without this worker, which has come back (reason FENCED); its batches went
    back into the pool, and the weights are the job's newest. pending: where the servers have a
    --global-batch, an update may take several batches of this worker. step() after one that is
    not the last of them adds its gradient up here, sends nothing and changes no weight; `result`
    stays that of the update before, and pending is True: an LR scheduler that is stepped with
    every update is not stepped then.
    """

    _step_supports_amp_scaling = True
    """GradScaler calls step() in any case, and says in `found_inf` whether there is to be none."""

    found_inf: Tensor | float = 0.0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        session: Session,
        overlap: bool = False,
        pipeline: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        _refuse_history(optimizer.state)
        _refuse_own_step(optimizer)
        self._bridge = ModelAdapter(model, optimizer, clip_norm_of(clip_norm))
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, StateOnServers()
        vars(self).update(
            {name: hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")}
        )
        self.result: PushResult | None = None
        self.pending = False
        self._settings = GroupSettings(optimizer)
        self._session = session
        self._told_groups = ""
        self._pipelined = pipeline
        self._leaves = False
        plan = session.with_rejoin(lambda: session.client.agree(self._bridge.spec))
        self._bridge.attach(plan, session.client.tapes(), double_buffered=pipeline)
        session.with_rejoin(lambda: session.client.start(self._bridge.weights.memory))
        self._bridge.scatter(everything=True)
        self._sum = GradientAccumulation(self._bridge.trainable.tensors)
        self._courier = self._make_courier(model, overlap)
        self._handed_over, self._refusal = optimizer, optimizer.register_step_pre_hook(_refuse_step)

    def _make_courier(self, model: nn.Module, overlap: bool) -> StepStrategy:
        bridge, session = self._bridge, self._session
        if self._pipelined:
            return PipelinedStep(bridge, session.client, model, self._decide, self.wait)
        if overlap:
            return OverlappedStep(
                bridge,
                session.client,
                model,
                session.enter,
                self._healing_forward,
                self.wait,
            )
        return StepStrategy(bridge, session.client)

    @property
    def grad_scale(self) -> Tensor:
        """What GradScaler has gradients divided by: that is done at once, so that hooks see them
        without it.
        """
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, scale: Tensor | None) -> None:
        if scale is not None:
            unscale(
                [
                    p.grad
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ],
                scale,
            )

    @grad_scale.deleter
    def grad_scale(self) -> None:
        pass

    @_step_of_torch
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Sends the gradients, waits until the policy lets them count, and leaves the newest
        weights in the model.

        closure: as in torch, evaluates the model and returns the loss, which is returned.
        samples: the weight of this gradient in a round's average; by default the number of
        samples in the batches that were used since the last step, or 1 without `job.batches`. A
        parameter whose grad is None is left alone, on all its servers. Where a step is a part of
        an update (see `pending`), zero_grad() follows it as any other. In a script that goes
        through `job.batches`, a step with neither a gradient nor a batch to train on since the
        last one does nothing, and the samples of a step that GradScaler leaves out weigh nothing
        later.

        With NaN or Inf in a gradient nothing changes, on any server: NonFiniteError, or with
        `ps-server --bad-gradients skip` a warning, and `result` says "rejected".

        Raises also InvalidRequestError for a model that was moved or cast since it was handed
        over, Stopping in the second step after this worker was asked to leave or the job ended,
        and what the connection may raise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._handed_over._opt_called = True  # type: ignore[attr-defined]  # LR schedulers made with it look there
        self._push(samples)
        return loss

    def _leave_out(self) -> None:
        """GradScaler makes no step: what the gradients are of weighs nothing; in a
        --global-batch it counts as zero.
        """
        if self._session.consumed.shared:
            self.zero_grad()
            self._push(None)
        else:
            self._session.consumed.samples = 0
            self._courier.skip()

    @torch.no_grad()
    def _push(self, samples: int | None) -> None:
        session, groups = self._session, self._settings.groups_json(self.param_groups)
        weight = max(1, session.consumed.samples) if samples is None else _checked_weight(samples)
        if session.consumed.nothing and not self.has_gradients:
            return self._courier.skip()
        self._check_leaving()
        self.pending = session.consumed.following > 0 and session.consumed.lost is None
        if self.pending:
            return self._add_up(weight)
        session.enter("push")
        # how the push before ended, and so whether its groups counted, is not known yet in a
        # pipeline
        told = "" if groups == self._told_groups and not self._pipelined else groups
        push = Push(self._sum.finish(weight), session.consumed.batches, told)
        result = self._sent(push)
        push = replace(push, batches=session.consumed.batches)  # those of a lost place are gone
        self.result = result or self.result
        session.consumed.clear()
        session.finish_step(push.samples, self.result.seconds if self.result else {})
        if result is not None:
            self._decide(push, result)
        return None

    def _add_up(self, samples: int) -> None:
        self._sum.add(samples)
        self._session.consumed.samples = 0
        self._courier.skip()

    def _check_leaving(self) -> None:
        """One step is in progress when a worker is asked to leave; the next one is one too many."""
        if self._leaves:
            self._session.check_stopping()
        self._leaves = self._session.client.stopping

    def _sent(self, push: Push) -> PushResult | None:
        session = self._session
        if session.consumed.lost is not None:
            self._courier.skip()
            return lost(session.consumed.lost, session.version)
        try:
            result = self._courier.push(push)
        except DrainedError as error:
            session.stop(str(error), "drained")
        except FencedError as error:
            session.rejoin(error)
            return lost(error, session.version)
        session.reset_rejoin_count()
        return result

    def _decide(self, push: Push, result: PushResult) -> None:
        """A push has ended."""
        self.result = result
        if result.status == "rejected":
            self._refused(result.reason)
        if result.status == "stale":
            self._session.stats.stale += 1
            with suppress(FencedError):  # then they have gone back already
                self._session.client.return_batches(push.batches)
            if not result.lost:
                log.warning(
                    "push_stale", staleness=result.staleness, returned_batches=len(push.batches)
                )
        else:
            self._told_groups = push.groups_json or self._told_groups

    def _refused(self, why: str) -> None:
        if self._session.client.bad_gradients != "skip":
            reason, _, detail = why.partition(": ")
            raise error_for(reason, detail)
        self._session.stats.rejected += 1
        log.warning("step_skipped", reason=why)

    @property
    def has_gradients(self) -> bool:
        """Has any parameter one?"""
        return self._bridge.has_gradients

    @torch.no_grad()
    def pull(self) -> None:
        """The job's newest weights and buffers into the model, without a step."""
        with self._session.rejoin_on_fence():
            self._courier.pull()

    @torch.no_grad()
    def wait(self) -> None:
        """As Job.wait."""
        with self._session.rejoin_on_fence():
            self._courier.settle()

    @contextmanager
    def _healing_forward(self) -> Iterator[None]:
        """Amid a forward: its first modules have used other weights than the rest will, so its
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
        """As Job.save."""
        self.wait()
        save(self._session.client, self._bridge, file)

    def drop(self, error: PSError) -> None:
        """The worker has lost its place: what is on its way is lost or lands now."""
        self._sum.clear()
        self._courier.drop(error)

    @torch.no_grad()
    def renew(self) -> None:
        """The worker has a new place: the model gets all that the job has."""
        self._told_groups = ""
        self._courier.renew()

    def close(self) -> None:
        """The model is the script's own again, as it is now."""
        self._refusal.remove()
        self._courier.close()

    @property
    def _is_copy(self) -> bool:
        """What deepcopy and pickle make: settings without a job, as deep copies of a scheduler
        need them.
        """
        return "_session" not in vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._is_copy:
            self.register_step_pre_hook(_refuse_copy)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before the model is handed over: the servers cannot take in more parameters
        later.
        """
        if hasattr(self, "_courier"):
            raise InvalidRequestError(
                "a job's parameters are fixed; give the optimizer all of them at the start and "
                "switch requires_grad"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters, and which job and version they belong to. The moments are in the
        servers' snapshots.
        """
        if self._is_copy:
            return super().state_dict()
        self.wait()
        return super().state_dict() | {
            MARK: {"job": self._session.client.job, "version": self._session.version}
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the hyper-parameters; they travel with the next step.

        Raises InvalidRequestError for the state_dict of a plain torch optimizer that has made
        steps: its moments cannot be brought to the servers, and training on without them would
        be another training. To drop them on purpose, load `{**state_dict, "state": {}}`; to go
        on where a job stopped, resume the servers' snapshot.
        """
        _refuse_history(state_dict["state"])
        shared = self.param_groups
        super().load_state_dict({**state_dict, "state": {}})
        for mine, loaded in zip(shared, self.param_groups, strict=True):
            mine.update(loaded, params=mine["params"])
        self.param_groups, self.state = shared, StateOnServers()


def unscale(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Divides them, with the very bits of GradScaler's own division. It does not divide what
    could become 0.
    """
    if any(gradient.dtype is torch.float16 for gradient in gradients):
        raise ValueError("Attempting to unscale FP16 gradients.")
    for _, group in groupby(sorted(gradients, key=_dtype), _dtype):
        alike = list(group)
        inverse = scale.double().reciprocal().float().to(alike[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, torch.zeros_like(inverse), inverse)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype)


def _checked_weight(samples: Any) -> int:
    with suppress(TypeError):
        if not isinstance(samples, bool) and (weight := index(samples)) > 0:
            return weight
    raise InvalidRequestError(
        f"samples={samples!r}: the weight of a gradient is a whole number of samples, at least 1; "
        "to leave a gradient out, do not call step()"
    )


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The other optimizer's step would change this worker's copy of the weights, and nothing on
    the servers.
    """
    if not isinstance(optimizer, ServerOptimizer):  # the two share their hooks
        raise InvalidRequestError(
            "this optimizer was handed over: call step() of the one that job.optimizer(...) "
            "returned, which takes its place"
        )


def _refuse_own_step(optimizer: torch.optim.Optimizer) -> None:
    """As a subclass is. LR schedulers put a step of their own there, which counts and changes
    nothing.
    """
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise InvalidRequestError(
            "this optimizer's step() was replaced, and the servers' would be torch's own: hand it "
            "over as it was; what is to happen before or after a step goes into "
            "register_step_pre_hook and register_step_post_hook"
        )


def _refuse_copy(*_: Any) -> None:
    raise InvalidRequestError(
        "this is a copy of a job's optimizer, which has its settings but no place in the job: call "
        "step() of the one that job.optimizer(...) returned"
    )


def _refuse_history(state: Mapping[Any, Any]) -> None:
    """Adagrad has state before its first step; a step, or a moment without a count of steps,
    makes it history.
    """
    for entries in state.values():
        kept = {key: value for key, value in entries.items() if value is not None}
        if kept and float(kept.get("step", 1)) != 0:
            raise InvalidRequestError(
                "this optimizer state has steps behind it, and moments cannot be brought to the "
                "servers: start with a fresh torch optimizer, and let the servers resume their own "
                "snapshot (ps-server --resume)"
            )
