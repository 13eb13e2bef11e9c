"""The torch optimizer that a script holds: it looks like any other, and its steps happen on the servers."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError, error_for
from pscommon.optimizers import groups_to_json, spec_of
from psworker.bridge import Bridge
from psworker.results import PushResult

if TYPE_CHECKING:
    from psworker.job import Job

log = logging.getLogger("psworker")

MARK = "paramserver"


class ServerOptimizer(torch.optim.Optimizer):
    """Takes the place of `optimizer`, whose class, hyper-parameters and parameter groups the servers carry out.

    Made by `Job.optimizer`. The groups are shared with `optimizer`, and LR schedulers work on either: what stands in
    them travels with the next step. Optimizer state (moments) lives on the servers, `state` here stays empty.

    result: PushResult of the last step, None before the first. status "applied" or "duplicate": it counted; "stale":
    the policy found the gradient too old, its batches went back into the pool, and the weights are the job's newest.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, job: "Job") -> None:
        _refuse_history(optimizer.state)
        self._bridge = Bridge(model, optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.result: PushResult | None = None
        self._template = optimizer
        self._job = job
        self._sent_groups = ""
        self._bridge.attach(job.client.agree(self._bridge.spec))
        job.client.start(self._bridge.weights.memory)
        self._bridge.scatter(everything=True)

    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Sends the gradients, waits until the policy lets them count, and leaves the newest weights in the model.

        closure: as in torch, evaluates the model and returns the loss, which is returned. samples: the weight of this
        gradient in a round's average; by default the number of samples in the batches that were used since the last
        step, or 1 without `job.batches`. A parameter whose grad is None is left alone, on all its servers.

        Raises NonFiniteError for NaN or Inf in a gradient (nothing has changed then), InvalidRequestError for a
        model that was moved or cast since it was handed over, and what the connection may raise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._push(samples)
        return loss

    def _push(self, samples: int | None) -> None:
        job, groups = self._job, groups_to_json(spec_of(self._template).groups)
        job.enter("push")
        absent = self._bridge.gather()
        batches, counted = job.usage.batches, samples or max(1, job.usage.samples)
        self.result = result = job.client.exchange(
            gradients=self._bridge.gradients.memory,
            weights=self._bridge.weights.memory,
            absent=absent,
            samples=counted,
            batches=batches,
            groups_json="" if groups == self._sent_groups else groups,
        )
        self._bridge.scatter()
        job.usage.clear()
        job.finish_step(result, counted)
        if result.status == "rejected":
            reason, _, detail = result.reason.partition(": ")
            raise error_for(reason, detail)
        if result.status == "stale":
            job.client.return_batches(batches)
            log.warning("push was stale by %d versions; its %d batches went back", result.staleness, len(batches))
        else:
            self._sent_groups = groups

    @torch.no_grad()
    def pull(self) -> None:
        """The job's newest weights and buffers into the model, without a step."""
        self._bridge.reattach()
        self._job.client.exchange(gradients=None, weights=self._bridge.weights.memory)
        self._bridge.scatter()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before the model is handed over: the servers cannot take in more parameters later."""
        if hasattr(self, "_sent_groups"):
            raise InvalidRequestError(
                "a job's parameters are fixed; give the optimizer all of them at the start and switch requires_grad"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters, and which job and version they belong to. The moments are in the servers' snapshots."""
        return super().state_dict() | {MARK: {"job": self._job.client.job, "version": self._job.version}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the hyper-parameters; they travel with the next step.

        Raises InvalidRequestError for the state_dict of a plain torch optimizer that has made steps: its moments
        cannot be brought to the servers, and training on without them would be another training. To drop them on
        purpose, load `{**state_dict, "state": {}}`; to go on where a job stopped, resume the servers' snapshot.
        """
        _refuse_history(state_dict["state"])
        shared = self.param_groups
        super().load_state_dict({**state_dict, "state": {}})
        for mine, loaded in zip(shared, self.param_groups, strict=True):
            mine.update(loaded, params=mine["params"])
        self.param_groups = shared


def _refuse_history(state: Mapping[Any, Any]) -> None:
    """Adagrad has state before its first step; a step, or a moment without a count of steps, makes it history."""
    for entries in state.values():
        kept = {key: value for key, value in entries.items() if value is not None}
        if kept and float(kept.get("step", 1)) != 0:
            raise InvalidRequestError(
                "this optimizer state has steps behind it, and moments cannot be brought to the servers: start with a "
                "fresh torch optimizer, and let the servers resume their own snapshot (ps-server --resume)"
            )
