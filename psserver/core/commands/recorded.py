"""Commands in logs on disk: JSON with the name, the time and the arguments."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import (
    CallCollective,
    LeaseBatches,
    ReportMetrics,
    ReportValues,
    ReturnBatches,
)
from psserver.core.commands.job_commands import (
    Advance,
    ContinueJob,
    FinishSnapshot,
    RecordPart,
    SetPolicy,
    StartCut,
    UseRules,
)
from psserver.core.commands.shard_commands import (
    AddFollower,
    DropShardReports,
    FinishReshard,
    ProcessReport,
    RecordLoadedShard,
    RefusePush,
    RestartShard,
    StartReshard,
)
from psserver.core.commands.worker_commands import (
    DrainWorker,
    EndAbsence,
    ForgetDeparted,
    Join,
    KeepPlace,
    Leave,
    Lose,
    Register,
)

DECODERS: Mapping[str, Callable[..., Command[Any]]] = {
    Join.wire_name: Join,
    Register.wire_name: Register.from_json,
    Leave.wire_name: Leave,
    DrainWorker.wire_name: DrainWorker,
    KeepPlace.wire_name: KeepPlace,
    EndAbsence.wire_name: EndAbsence,
    Lose.wire_name: Lose,
    ForgetDeparted.wire_name: ForgetDeparted,
    LeaseBatches.wire_name: LeaseBatches.from_json,
    ReturnBatches.wire_name: ReturnBatches.from_json,
    ReportValues.wire_name: ReportValues.from_json,
    ReportMetrics.wire_name: ReportMetrics,
    CallCollective.wire_name: CallCollective.from_json,
    ProcessReport.wire_name: ProcessReport.from_json,
    RefusePush.wire_name: RefusePush,
    AddFollower.wire_name: AddFollower,
    RestartShard.wire_name: RestartShard,
    DropShardReports.wire_name: DropShardReports,
    StartReshard.wire_name: StartReshard.from_json,
    RecordLoadedShard.wire_name: RecordLoadedShard,
    FinishReshard.wire_name: FinishReshard,
    SetPolicy.wire_name: SetPolicy.from_json,
    UseRules.wire_name: UseRules.from_json,
    Advance.wire_name: Advance,
    StartCut.wire_name: StartCut,
    RecordPart.wire_name: RecordPart.from_json,
    FinishSnapshot.wire_name: FinishSnapshot,
    ContinueJob.wire_name: ContinueJob,
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
