"""Warnings about members whose hyper-parameters a round does not use."""

from collections.abc import Sequence

from pscommon.core.log_entries import Apply
from pscommon.telemetry.logs import get_logger
from psserver.durability.shard_state import ShardState
from psserver.parameters.push_groups import PushGroups
from psserver.shard.observers import ShardObserver

MAX_VALUES_COUNT = 3
"""Number of differing values that a warning names."""

log = get_logger(__name__)


class DifferingGroups(ShardObserver):
    """Logs once, on shard 0, that a member has other hyper-parameters than its round uses."""

    def __init__(self) -> None:
        self._state: ShardState | None = None
        self._reported: set[int] = set()

    def on_model(self, state: ShardState) -> None:
        self._state = state if state.shard == 0 else None

    def on_update(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        if self._state is None or len(entry.contributions) == 1:
            return
        used = self._state.groups_of(entry)
        for key, *_ in entry.contributions:
            own = self._state.staged[key].staging.groups
            # equal texts are one object, usually
            if used is None or own is None or own is used or own.values == used.values:
                continue
            if key.worker not in self._reported:
                self._reported.add(key.worker)
                log.warning(
                    "hyper_parameters_differ",
                    worker=key.worker,
                    own=_differing(own, used),
                    used=_differing(used, own),
                    remedy="call job.resume(scheduler) with each new LR scheduler; values that "
                    "change in another way must change in all workers at the same step",
                )

    def on_evict(self, worker: int) -> None:
        self._reported.discard(worker)


def _differing(groups: PushGroups, others: PushGroups) -> str:
    """Return the values that `others` has not, as "group 0 lr 0.1, group 1 lr 0.01"."""
    found = [
        f"{f'group {index} ' if len(groups.values) > 1 else ''}{key} {value!r}"
        for index, (group, other) in enumerate(zip(groups.values, others.values, strict=True))
        for key, value in sorted(group.items())
        if other[key] != value
    ]
    more = len(found) - MAX_VALUES_COUNT
    return ", ".join(found[:MAX_VALUES_COUNT]) + (f" and {more} more" if more > 0 else "")
