"""Facts about this server and its job, as far as it knows them."""

import threading
import uuid
from collections.abc import Sequence

from pscommon.core.errors import MismatchError, UnreachableError
from psserver.process.job_files import JobIdFile
from psserver.process.worker_keys import WorkerKeys


class ServerIdentity:
    """Facts about one server process.

    Attributes:
        shards: Number of shards of the job, as far as this server knows.
        reshard_count: How often that number has changed.
        instance: Differs at every start of the process.
        job: Name of the job; empty until it is known.
        only_job: The only job that this server may follow; empty: any. It comes from the command
            line, from the data directory, or from the first job that it followed.
        policy: Name of the policy; empty until shard 0 has sent it.
        coordinator: Address of shard 0; empty until it is known.
        term: This server's term as the shard's primary.
        standbys: Addresses of the standbys by shard; empty where there is none.
        worker_keys: The keys by which workers are known.
        stream_address: HOST:PORT of this server's stream port; empty: it has none.
        stream_path: This server's Unix socket; empty: it has none.
        coordinator_hint: A possible address of shard 0, from a worker of the job or from the
            former primary.
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
        self.reshard_count = 0
        self.address = address
        self.instance = uuid.uuid4().hex
        self.job = job
        self.only_job = job or bound
        self._name = name or JobIdFile(None)
        self.policy = ""
        self.coordinator = address if shard == 0 else coordinator
        self.term = 1
        self.standbys: Sequence[str] = ()
        self.worker_keys = WorkerKeys(shard)
        self.stream_address = self.stream_path = ""
        self.coordinator_hint = ""
        self._addresses = [address if index == shard else "" for index in range(shards)]
        self._changed = threading.Condition()

    @property
    def addresses(self) -> list[str]:
        """Addresses of all shards, as far as they are known."""
        with self._changed:
            return list(self._addresses)

    def check_job(self, job: str) -> None:
        """Check that a request is for this server's job.

        Raises:
            MismatchError: It is for another job.
            UnreachableError: This server does not know its job yet.
        """
        if not self.job:
            raise UnreachableError(
                f"shard {self.shard} is not connected to the coordinator yet", "NOT_READY"
            )
        if job != self.job:
            raise MismatchError(f"this server's job is {self.job}, not {job}", "JOB_MISMATCH")

    def check_term(self, term: int) -> None:
        """Check that the caller knows no later primary of this shard.

        Raises:
            UnreachableError: It does.
        """
        if term > self.term:
            text = (
                f"shard {self.shard} has a primary of term {term}; "
                f"this server was one in term {self.term}"
            )
            raise UnreachableError(text, "NOT_PRIMARY")

    def learn(self, job: str, addresses: Sequence[str], reshard_count: int) -> None:
        """Record what the coordinator sends."""
        with self._changed:
            self.job, self._addresses, self.shards, self.reshard_count = (
                job,
                list(addresses),
                len(addresses),
                reshard_count,
            )
            self.only_job = job
        self._name.store(job)

    def find(self, coordinator: str) -> None:
        """Record the address of shard 0's new primary."""
        with self._changed:
            self.coordinator = coordinator

    def introduce(self, coordinator: str, job: str = "") -> None:
        """Record the address of shard 0 that a worker sends.

        A worker of this job names it; then the address is only a hint.

        Raises:
            MismatchError: This server follows another coordinator.
        """
        with self._changed:
            if job and job in (self.job, self.only_job):
                self.coordinator_hint = coordinator
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
        """Return the address of shard 0; empty if it is unknown after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.coordinator, seconds)
            return self.coordinator
