"""Commands on disk: every class has a name, and recorded commands keep their bytes."""

import dataclasses
import json

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from psserver.core.commands import data_commands, job_commands, shard_commands, worker_commands
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import LeaseBatches, ReturnBatches
from psserver.core.commands.job_commands import ContinueJob, PolicySettings, SetPolicy
from psserver.core.commands.recorded import DECODERS, RecordedCommand
from psserver.core.commands.worker_commands import Join, Lose

MODULES = (data_commands, job_commands, shard_commands, worker_commands)
KINDS = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Command) and kind is not Command
]


def test_every_command_has_a_name_on_disk_that_decodes_to_it() -> None:
    assert sorted(kind.wire_name for kind in KINDS) == sorted(DECODERS)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_are_frozen_dataclasses_with_slots(kind: type[Command[object]]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(kind)


LINES = {
    '{"do": "join", "now": 1.5, "rank": null, "host": "h", "pid": 7, "device": "cpu",'
    ' "attempt": 0}': Join(None, "h", 7, "cpu"),
    '{"do": "lose", "now": 1.5, "worker": 2, "reason": "it is late"}': Lose(2, "it is late"),
    '{"do": "next_batches", "now": 1.5, "worker": 1, "spec": {"loop": 0, "size": 4,'
    ' "batch_size": 2, "epochs": 1, "drop_last": false, "shuffle": true, "seed": 0,'
    ' "first_epoch": 0}, "received": 0, "count": 1, "idle": true, "first_open": null}': (
        LeaseBatches(1, LoopSpec(0, 4, 2), 0, 1, True)
    ),
    '{"do": "return_batches", "now": 1.5, "worker": 1, "batches": [[0, 3, 0, false]]}': (
        ReturnBatches(1, [BatchKey(0, 3)])
    ),
    '{"do": "return_batches", "now": 1.5, "worker": 1, "batches": [], "used": true}': (
        ReturnBatches(1, [], used=True)
    ),
    '{"do": "set_policy", "now": 1.5, "row": ["ssp", 2, null, 0]}': (
        SetPolicy(PolicySettings("ssp", 2))
    ),
    '{"do": "recovered", "now": 1.5, "generation": 3}': ContinueJob(3),
    '{"do": "recovered", "now": 1.5, "generation": 3, "resumes": true}': ContinueJob(3, True),
}


@pytest.mark.parametrize("line", LINES)
def test_commands_have_fixed_bytes_on_disk(line: str) -> None:
    recorded = RecordedCommand(LINES[line], 1.5)

    assert json.dumps(recorded.as_json()) == line
    assert RecordedCommand.from_json(json.loads(line)) == recorded


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (
            {"do": "join", "rank": 1, "host": "h", "pid": 7, "device": "cpu"},
            Join(1, "h", 7, "cpu", 0),
        ),
        (
            {"do": "return_batches", "worker": 1, "batches": [], "used": False},
            ReturnBatches(1, []),
        ),
    ],
)
def test_commands_of_earlier_releases_are_read(
    line: dict[str, object], command: Command[object]
) -> None:
    assert RecordedCommand.from_json({**line, "now": 2.0}) == RecordedCommand(command, 2.0)
