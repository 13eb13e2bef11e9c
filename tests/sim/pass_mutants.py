"""Planted bugs in passes inside other passes, in trainings, and in pushes of buffers only; see
mutants.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pscommon.core.log_entries import SetBuffers, Staged
from pscommon.core.script_place import PassName
from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.data.loop import LoopLedger
from psserver.core.data.script_places import PassNumbers
from psserver.core.job.policy import policy
from psserver.core.job.trainings import Trainings
from tests.sim.scenario import Scenario


def keep_unreachable_batches(participation: Participation) -> None:
    """Leave batches with workers that wait in another pass or in a collective call."""


def omit_pass_names(passes: PassNumbers, loop: LoopLedger, name: PassName) -> None:
    """Do not save which pass a loop is."""
    passes._numbers[name] = loop.spec.loop


def with_test_passes(scenario: Scenario) -> Scenario:
    """Let three workers make passes inside their loops, at different moments."""
    return replace(
        scenario,
        policy=policy("sync"),
        workers=3,
        batches=5,
        test_interval=1,
        collectives=True,
        server_kills=2,
        has_log=True,
    )


def forget_finished(trainings: Trainings, name: str) -> Trainings:
    """Forget which trainings are over."""
    return Trainings(name)


def with_trainings(scenario: Scenario) -> Scenario:
    """Let restarted workers begin with a training that is over."""
    return replace(scenario, trainings=3, worker_kills=3, restarts_workers=True)


def take_old_buffers(rounds: UpdateRounds, push: Staged) -> None:
    """Take buffers of any version."""
    rounds._job.log.append(SetBuffers(rounds._job.log.next, push.key))
    rounds._forget(push.key)


def with_buffers(scenario: Scenario) -> Scenario:
    """Let workers send buffers while others make updates."""
    return replace(scenario, policy=policy("async"), workers=3, sends_buffers=True)


SCENARIOS: Mapping[str, Callable[[Scenario], Scenario]] = {
    "workers in different passes wait for each other": with_test_passes,
    "names of passes are not saved": with_test_passes,
    "a training that is over begins again": with_trainings,
    "buffers of an older version are taken": with_buffers,
}
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "workers in different passes wait for each other": (
        Participation,
        "_free_unreachable_batches",
        keep_unreachable_batches,
    ),
    "names of passes are not saved": (PassNumbers, "give", omit_pass_names),
    "a training that is over begins again": (Trainings, "followed_by", forget_finished),
    "buffers of an older version are taken": (UpdateRounds, "_set_buffers", take_old_buffers),
}
