"""Statistics of a job's steps, stale steps, waiting, reported values and leaving."""

import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import psworker
from pscommon.core.data_loop import LoopSpec
from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.job import Job
from tests.support.one_layer_job import RecordingClient, set_gradients, start_job


class LongPushClient(RecordingClient):
    """Client that reports longer times than the step took, as overlapped pushes may."""

    def exchange(self, **call: Any) -> PushResult:
        return replace(
            super().exchange(**call), seconds={"push": 9.0, "wait": 9.0, "apply": 9.0, "pull": 9.0}
        )


class StaleClient(RecordingClient):
    """Client whose pushes are all stale."""

    def exchange(self, **call: Any) -> PushResult:
        super().exchange(gradients=None, weights=call["weights"])
        return PushResult("stale", 7, staleness=4)


def test_a_stale_step_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    client = StaleClient()
    job, net, optimizer = start_job(client)
    data = torch.arange(8.0).reshape(4, 2)

    with caplog.at_level(logging.WARNING, logger="psworker"):
        for number, _ in enumerate(job.batches(data, 2, shuffle=False)):
            set_gradients(net)
            optimizer.step()
            if number == 1:
                break
    again = client.data.next_batches(LoopSpec(0, size=4, batch_size=2), count=9)

    assert job.last == PushResult("stale", 7, staleness=4)
    assert job.stats.stale == 2
    assert again.numbers == (0, 1)
    assert "push_stale staleness=4" in caplog.text


def test_stats_contain_the_seconds_of_each_phase() -> None:
    client = RecordingClient()
    job, net, optimizer = start_job(client)

    for _ in job.batches(torch.ones(6, 3), 2):
        set_gradients(net)
        optimizer.step()

    assert (job.stats.steps, job.stats.samples) == (3, 6)
    assert set(job.stats.last) == {"data", "pull", "compute", "push", "wait", "apply"}
    assert job.stats.last["apply"] > 0
    assert job.stats.total["compute"] > job.stats.last["compute"] > 0
    assert job.stats.samples_per_second > 0
    assert {"data", "compute", "push", "idle"} <= set(client.phases)


def test_phases_add_up_to_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds that the exchange reports divide the script's waiting time; they do not add to
    it.
    """
    ticks = itertools.count()
    monkeypatch.setattr(
        "psworker.session.step_stats.time", SimpleNamespace(monotonic=lambda: float(next(ticks)))
    )
    job, net, optimizer = start_job(LongPushClient())
    job.enter("compute")  # tick 0

    for _ in range(3):
        set_gradients(net)
        optimizer.step()
        assert min(job.stats.last.values()) >= 0
    job.stats.finish_step(0, {})

    assert sum(job.stats.total.values()) == next(ticks) - 1


def test_wait_without_a_step_returns_at_once() -> None:
    Job(LocalClient()).wait()
    job, _, _ = start_job()
    job.wait()

    assert job.last is None


def test_reported_values_are_converted_to_floats() -> None:
    client = LocalClient()

    Job(client).report(loss=torch.tensor(0.5), accuracy=1)

    assert client.metrics == {"loss": 0.5, "accuracy": 1.0}


def test_a_job_leaves_once_with_the_reason() -> None:
    fine, broken = RecordingClient(), RecordingClient()

    with Job(fine) as job:
        job.close()
    with pytest.raises(ZeroDivisionError), Job(broken):
        _ = 1 / 0

    assert fine.reasons == [""]
    assert broken.reasons == ["ZeroDivisionError: division by zero"]


class UnreachableClient(LocalClient):
    def leave(self, reason: str = "") -> None:
        raise psworker.UnreachableError("no answer")


def test_an_error_while_leaving_does_not_hide_the_error_of_the_script() -> None:
    with pytest.raises(ZeroDivisionError), Job(UnreachableClient()):
        _ = 1 / 0
    with pytest.raises(psworker.UnreachableError), Job(UnreachableClient()):
        pass
