"""The torch optimizer that a script holds: it looks like any other, and its steps happen on the servers."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pscommon import interruptible
from pscommon.core.errors import InvalidRequestError, error_for
from pscommon.optimizers import groups_to_json, spec_of
from psworker.bridge import Bridge
from psworker.local import JobClient
from psworker.overlap import Courier, Overlap, Push, barriers
from psworker.results import PushResult

if TYPE_CHECKING:
    from psworker.job import Job

log = logging.getLogger("psworker")

MARK = "paramserver"


class ServerOptimizer(torch.optim.Optimizer):
    """Takes the place of `optimizer`, whose class, hyper-parameters and parameter groups the servers carry out.

    Made by `Job.optimizer`, where overlap and pipeline are described. The groups are shared with `optimizer`, and LR
    schedulers work on either: what stands in them travels with the next step. Optimizer state (moments) lives on the
    servers, `state` here stays empty.

    result: PushResult of the last step that has been decided, None before the first. status "applied" or "duplicate":
    it counted; "stale": the policy found the gradient too old, its batches went back into the pool, and the weights
    are the job's newest.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        job: "Job",
        overlap: bool = False,
        pipeline: bool = False,
    ) -> None:
        _refuse_history(optimizer.state)
        self._bridge = Bridge(model, optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.result: PushResult | None = None
        self._template = optimizer
        self._settings = Settings(optimizer)
        self._job = job
        self._told_groups = ""
        self._pipelined = pipeline
        plan = job.client.agree(self._bridge.spec)
        self._bridge.attach(plan, job.client.tapes(), apart=pipeline)
        job.client.start(self._bridge.weights.memory)
        self._bridge.scatter(everything=True)
        self._courier = self._make_courier(model, overlap)

    def _make_courier(self, model: nn.Module, overlap: bool) -> Courier:
        bridge, job = self._bridge, self._job
        if self._pipelined:
            return Pipeline(bridge, job.client, model, self._decide)
        return Overlap(bridge, job.client, model, job.change) if overlap else Courier(bridge, job.client)

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
        job, groups = self._job, self._settings.groups_json()
        job.enter("push")
        # how the push before ended, and so whether its groups counted, is not known yet in a pipeline
        told = "" if groups == self._told_groups and not self._pipelined else groups
        push = Push(samples or max(1, job.usage.samples), job.usage.batches, told)
        result = self._courier.push(push)
        self.result = result or self.result
        job.usage.clear()
        job.finish_step(push.samples, self.result.seconds if self.result else {})
        if result is not None:
            self._decide(push, result)

    def _decide(self, push: Push, result: PushResult) -> None:
        """A push has ended."""
        self.result = result
        if result.status == "rejected":
            reason, _, detail = result.reason.partition(": ")
            raise error_for(reason, detail)
        if result.status == "stale":
            self._job.stats.stale += 1
            self._job.client.return_batches(push.batches)
            log.warning("push was stale by %d versions; its %d batches went back", result.staleness, len(push.batches))
        else:
            self._told_groups = push.groups_json or self._told_groups

    @torch.no_grad()
    def pull(self) -> None:
        """The job's newest weights and buffers into the model, without a step."""
        self._courier.pull()

    @torch.no_grad()
    def wait(self) -> None:
        """As Job.wait."""
        self._courier.settle()

    def close(self) -> None:
        """The model is the script's own again, as it is now."""
        self._courier.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before the model is handed over: the servers cannot take in more parameters later."""
        if hasattr(self, "_courier"):
            raise InvalidRequestError(
                "a job's parameters are fixed; give the optimizer all of them at the start and switch requires_grad"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters, and which job and version they belong to. The moments are in the servers' snapshots."""
        self.wait()
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


@dataclass(slots=True)
class Flight:
    """A push on its way. base: version of the weights that its gradient was computed from. future: None: it failed."""

    push: Push
    absent: frozenset[int]
    base: int
    future: "Future[PushResult] | None" = None


class Pipeline(Courier):
    """Hands each push to a thread and gets its end at the next one.

    The weights that a push brings reach the model when the next gradient has been computed, from those before. decided:
    told how each push ended, once; may raise. A push that fails on its way stays and is tried again, so that it counts
    once.
    """

    def __init__(
        self, bridge: Bridge, client: JobClient, model: nn.Module, decided: Callable[[Push, PushResult], None]
    ) -> None:
        super().__init__(bridge, client)
        self._decided = decided
        self._flight: Flight | None = None
        self._version = client.version
        self._hooks = barriers(model, torch.no_grad()(self.settle))

    def push(self, push: Push) -> None:
        base, result = self._version, self._land()
        absent = self._bridge.gather()  # before the weights come: with them come the buffers
        if result is not None:
            self._unload(result)
        self._start(Flight(push, absent, base))

    def pull(self) -> None:
        self.settle()
        super().pull()
        self._version = self._client.version

    def settle(self) -> None:
        if (result := self._land()) is not None:
            self._bridge.reattach()
            self._unload(result)

    def close(self) -> None:
        """A push that is still on its way counts or not, as the servers decide."""
        for hook in self._hooks:
            hook.remove()

    def _land(self) -> PushResult | None:
        """Waits for the push that is on its way; its weights are then on the host."""
        if self._flight is None:
            return None
        future = self._flight.future or self._start(self._flight)
        interruptible.settle(future)
        if future.exception() is not None:
            self._flight.future = None
        return future.result()

    def _unload(self, result: PushResult) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        self._bridge.scatter()
        self._version = result.version
        self._decided(flight.push, result)

    def _start(self, flight: Flight) -> "Future[PushResult]":
        future: Future[PushResult] = Future()
        self._flight, flight.future = flight, future
        # a daemon: a script that fails must be able to end
        threading.Thread(target=self._fly, args=(flight, future), name="paramserver-push", daemon=True).start()
        return future

    def _fly(self, flight: Flight, future: "Future[PushResult]") -> None:
        push = flight.push
        try:
            result = self._client.exchange(
                gradients=self._bridge.gradients.memory,
                weights=self._bridge.weights.memory,
                absent=flight.absent,
                samples=push.samples,
                batches=push.batches,
                groups_json=push.groups_json,
                base=flight.base,
            )
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


class Settings:
    """An optimizer's hyper-parameters as JSON, made anew only where they may have changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[dict[str, Any]] | None = None
        self._text = ""

    def groups_json(self) -> str:
        """Of the parameter groups as they stand now."""
        seen = [{key: value for key, value in g.items() if key != "params"} for g in self._optimizer.param_groups]
        if seen != self._seen or not all(_is_constant(value) for group in seen for value in group.values()):
            self._seen, self._text = seen, groups_to_json(spec_of(self._optimizer).groups)
        return self._text


def _is_constant(value: Any) -> bool:
    """A tensor or a list may have changed without being another one."""
    return all(map(_is_constant, value)) if type(value) is tuple else isinstance(value, (float, int, str, type(None)))


def _refuse_history(state: Mapping[Any, Any]) -> None:
    """Adagrad has state before its first step; a step, or a moment without a count of steps, makes it history."""
    for entries in state.values():
        kept = {key: value for key, value in entries.items() if value is not None}
        if kept and float(kept.get("step", 1)) != 0:
            raise InvalidRequestError(
                "this optimizer state has steps behind it, and moments cannot be brought to the servers: start with a "
                "fresh torch optimizer, and let the servers resume their own snapshot (ps-server --resume)"
            )
