"""Who this server is, and whom it has been told of."""

import threading
import uuid
from collections.abc import Sequence

from pscommon.core.errors import MismatchError, UnreachableError
from psserver.process.job_id_file import JobIdFile


class ServerIdentity:
    """One server process. job and coordinator are empty until they are known; instance differs
    at every start.

    shards: of the job, as far as this server knows; layout: how often that has changed. policy:
    its name, empty until shard 0 has told it to another one. bound: the only job that this
    server may follow, by its command line, by its data directory (name), or because it has
    followed it; empty: any.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        address: str,
        coordinator: str = "",
        job: str = "",
        bound: str = "",
        name: JobIdFile | None = None,
    ) -> None:
        self.shard = shard
        self.shards = shards
        self.layout = 0
        self.address = address
        self.instance = uuid.uuid4().hex
        self.job = job
        self.bound = job or bound
        self._name = name or JobIdFile(None)
        self.policy = ""
        self.coordinator = address if shard == 0 else coordinator
        self.term = 1  # as the shard's primary
        self.standbys: Sequence[str] = ()  # by shard, empty where there is none
        # where shard 0 may be besides, as a worker of the job says, or said who was primary here
        # before
        self.hint = ""
        self._addresses = [address if index == shard else "" for index in range(shards)]
        self._changed = threading.Condition()

    @property
    def addresses(self) -> list[str]:
        """Of all shards, as far as they are known."""
        with self._changed:
            return list(self._addresses)

    def check_job(self, job: str) -> None:
        """MismatchError for a request to another job."""
        if not self.job:
            raise UnreachableError(
                f"shard {self.shard} has not heard from the coordinator yet", "NOT_READY"
            )
        if job != self.job:
            raise MismatchError(f"this server's job is {self.job}, not {job}", "JOB_MISMATCH")

    def check_term(self, term: int) -> None:
        """UnreachableError where the caller knows of a later primary of this shard."""
        if term > self.term:
            text = f"shard {self.shard} has a primary of term {term}; this server was one in term {self.term}"
            raise UnreachableError(text, "NOT_PRIMARY")

    def learn(self, job: str, addresses: Sequence[str], layout: int) -> None:
        """What the coordinator says."""
        with self._changed:
            self.job, self._addresses, self.shards, self.layout = (
                job,
                list(addresses),
                len(addresses),
                layout,
            )
            self.bound = job
        self._name.note(job)

    def find(self, coordinator: str) -> None:
        """Shard 0 was found here: it has another primary now."""
        with self._changed:
            self.coordinator = coordinator

    def introduce(self, coordinator: str, job: str = "") -> None:
        """A worker, one of this job if it names it, says where shard 0 is. MismatchError from a
        stranger if this server follows another one."""
        with self._changed:
            if job and job in (self.job, self.bound):
                self.hint = coordinator
                return
            if self.coordinator not in ("", coordinator):
                raise MismatchError(
                    f"shard {self.shard} at {self.address} follows {self.coordinator}, not "
                    f"{coordinator}",
                    "SHARD_MISMATCH",
                )
            self.coordinator = coordinator
            self._changed.notify_all()

    def wait_for_coordinator(self, seconds: float) -> str:
        """The address of shard 0, or empty if nobody has told it within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.coordinator, seconds)
            return self.coordinator
