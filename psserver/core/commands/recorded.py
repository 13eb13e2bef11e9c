"""Commands in logs on disk: JSON with the name, the time and the arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from psserver.core.commands import data_commands, job_commands, shard_commands, worker_commands
from psserver.core.commands.command import Command

COMMANDS: Sequence[type[Command[Any]]] = (
    worker_commands.Join,
    worker_commands.Register,
    worker_commands.AskForReduce,
    worker_commands.Leave,
    worker_commands.DrainWorker,
    worker_commands.KeepPlace,
    worker_commands.EndAbsence,
    worker_commands.Lose,
    worker_commands.ForgetDeparted,
    data_commands.LeaseBatches,
    data_commands.ReturnBatches,
    data_commands.ReportValues,
    data_commands.ReportMetrics,
    data_commands.CallCollective,
    shard_commands.ProcessReport,
    shard_commands.RefusePush,
    shard_commands.AddFollower,
    shard_commands.RestartShard,
    shard_commands.DropShardReports,
    shard_commands.StartReshard,
    shard_commands.RecordLoadedShard,
    shard_commands.FinishReshard,
    job_commands.SetPolicy,
    job_commands.WantWorkers,
    job_commands.UseRules,
    job_commands.Advance,
    job_commands.StartCut,
    job_commands.RecordPart,
    job_commands.FinishSnapshot,
    job_commands.ContinueJob,
)

DECODERS: Mapping[str, Callable[..., Command[Any]]] = {
    command.wire_name: command.from_json for command in COMMANDS
}
"""Makes a command of its arguments on disk, by its name on disk."""


class RecordedCommand(NamedTuple):
    """A command and the time at which it was carried out."""

    command: Command[object]
    now: float

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`."""
        return {"do": self.command.wire_name, "now": self.now, **self.command.as_json()}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "RecordedCommand":
        """Return the command of a log.

        Raises:
            ValueError: This release does not know the command.
            TypeError: It does not know an argument.
        """
        if (decoder := DECODERS.get(raw["do"])) is None:
            raise ValueError(f"this release does not know the command {raw['do']!r}")
        args = {key: value for key, value in raw.items() if key not in ("do", "now")}
        return RecordedCommand(decoder(**args), raw["now"])
