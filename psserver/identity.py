"""Who this server is, and whom it has been told of."""

import threading
import uuid
from collections.abc import Callable, Sequence

from pscommon.core.errors import MismatchError


class Identity:
    """One server process. job and coordinator are empty until they are known; instance differs at every start."""

    def __init__(self, shard: int, shards: int, address: str, coordinator: str = "", job: str = "") -> None:
        self.shard = shard
        self.shards = shards
        self.address = address
        self.instance = uuid.uuid4().hex
        self.job = job
        self.on_job: Callable[[str], None] = lambda job: None
        self.coordinator = address if shard == 0 else coordinator
        self._addresses = [address if index == shard else "" for index in range(shards)]
        self._changed = threading.Condition()

    @property
    def addresses(self) -> list[str]:
        """Of all shards, as far as they are known."""
        with self._changed:
            return list(self._addresses)

    def learn(self, job: str, addresses: Sequence[str]) -> None:
        """What the coordinator says. on_job is called with a name that is new."""
        with self._changed:
            new, self.job = job != self.job, job
            self._addresses = list(addresses)
        if new:
            self.on_job(job)

    def introduce(self, coordinator: str) -> None:
        """A worker says where shard 0 is. MismatchError if this server follows another one."""
        with self._changed:
            if self.coordinator not in ("", coordinator):
                raise MismatchError(
                    f"shard {self.shard} at {self.address} follows {self.coordinator}, not {coordinator}",
                    "SHARD_MISMATCH",
                )
            self.coordinator = coordinator
            self._changed.notify_all()

    def wait_for_coordinator(self, seconds: float) -> str:
        """The address of shard 0, or empty if nobody has told it within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.coordinator, seconds)
            return self.coordinator
