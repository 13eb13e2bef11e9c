"""What the script of a simulated worker does beside training: passes over test data, and collective
calls.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import PassName, ScriptPlace
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import CallCollective, LeaseBatches, ReturnBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.workers.collectives import CollectiveValues
from tests.sim.invariants import check

if TYPE_CHECKING:
    from tests.sim.world import World

COLLECTIVE_CALL_COUNT = 3
TEST_BATCHES = 3


class ScriptParts:
    """Parts of `SimWorker`, which has these attributes and methods."""

    world: "World"
    rank: int
    worker: int
    request_number: int
    collective_count: int
    test_count: int
    tested: list[BatchKey]
    received_test_count: int
    request: Callable[[Command[Any], Callable[[Any], None]], None]
    send_request: Callable[[int, Callable[[Recorder, float], Any], Callable[[Any], None]], None]
    request_batch: Callable[..., None]
    pull: Callable[[Callable[[], None]], None]
    schedule: Callable[..., None]
    finish: Callable[[], None]

    def place(self, loader: str, number: int) -> ScriptPlace:
        return ScriptPlace(PassName(loader, number), {"test": self.test_count}, 0, 1)

    def test(self, idle: bool = False) -> None:
        """Make a pass over the test data, inside the pass over the training data."""
        spec = replace(self.world.loop, size=TEST_BATCHES, epochs=1)
        received, place = self.received_test_count, self.place("test", self.test_count)
        command = LeaseBatches(self.worker, spec, received, 1, idle, place=place)
        self.request(command, self.on_test_batch)

    def on_test_batch(self, lease: Any) -> None:
        if lease.numbers:
            self.tested += [BatchKey(lease.spec.loop, number) for number in lease.numbers]
            self.received_test_count += len(lease.numbers)
            return self.schedule(0.1 * self.world.rng.random(), self.test)
        if not lease.end:
            return self.test(idle=True)
        tested, self.tested, self.received_test_count = tuple(self.tested), [], 0
        self.test_count += 1

        def perform(recorder: Recorder, now: float) -> bool:
            recorder.do(ReturnBatches(self.worker, tested, used=True), now)
            return True

        self.request_number += 1
        return self.send_request(
            self.request_number,
            perform,
            lambda _: self.pull(lambda: self.request_batch(idle=False)),
        )

    def call_collectives(self) -> None:
        """Make the remaining collective calls, then leave."""
        if not self.world.scenario.collectives or self.collective_count == COLLECTIVE_CALL_COUNT:
            return self.finish()
        number, value = self.collective_count + 1, 0.1 * self.rank + self.world.rng.random()
        values = (
            CollectiveValues("all_reduce", ("loss",), (value,), self.rank + 1),
            CollectiveValues("broadcast", text=json.dumps(value if self.rank % 2 else None)),
            CollectiveValues("barrier"),
        )[number % 3]
        values = self.world.collective_calls.setdefault((self.worker, number), values)
        place = replace(self.place("train", 0), current=None, first_open={"train": 1})
        command = CallCollective(self.worker, number, values, 0, place)
        return self.request(command, self.on_collective_result)

    def on_collective_result(self, answer: tuple[CollectiveValues, int]) -> None:
        result, generation = answer
        self.collective_count += 1
        number = self.collective_count
        first = self.world.collective_results.setdefault((generation, number), result)
        check(
            first == result, "collective call {} has the results {} and {}", number, first, result
        )
        self.call_collectives()
