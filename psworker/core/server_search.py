"""Search for all servers of a job from some of their addresses, as a pure state machine.

Theory of operation: each server's answer holds its shard, the number of shards and the addresses
that it knows. The search ends in one of these states:

- Complete: each shard has answered and follows shard 0.
- Mismatch, at once: two processes have the same shard, or two servers belong to different jobs or
  to jobs of different sizes.
- Mismatch, after `grace` seconds without new information: a shard's address is unknown, and all
  known servers have answered. Or shard 0 works with another server for a shard.

A server that is still starting cannot be detected, so the caller's deadline ends other waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pscommon.core.errors import MismatchError, PSError, UnreachableError

REMEDY = "list every server, or start the others with `--join` and the address of shard 0"
# Prefixes of the address of a server that listens on all interfaces and has no public address.
# Other machines cannot use it.
WILDCARD_PREFIXES = ("0.0.0.0:", "[::]:")


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """A server's description of itself.

    Attributes:
        job: The job's identifier; empty if the server does not know it yet.
        shard: Index of the server's shard.
        shards: Number of shards of the job.
        addresses: Server addresses by shard; empty where unknown.
        coordinator: Address of shard 0; empty if the server does not know it yet.
        reshard_count: Number of changes of the number of shards, as far as the server knows.
    """

    job: str
    shard: int
    shards: int
    addresses: tuple[str, ...]
    coordinator: str
    reshard_count: int = 0

    @property
    def own(self) -> str:
        """The server's own public address; empty if unknown."""
        return self.hints().get(self.shard, "")

    def hints(self) -> dict[int, str]:
        """Return the usable addresses that the server knows, by shard."""
        known = [(0, self.coordinator), *enumerate(self.addresses)]
        return {
            shard: address
            for shard, address in known
            if address and not address.startswith(WILDCARD_PREFIXES)
        }


@dataclass(frozen=True, slots=True)
class JobServers:
    """All servers of one job.

    Attributes:
        job: The job's identifier.
        addresses: Server addresses by shard.
    """

    job: str
    addresses: tuple[str, ...]


class ServerSearch:
    """State of one search.

    Call order: ask the servers of `to_ask`, record each result with `answered` or `failed`, call
    `check`, and repeat.
    """

    def __init__(self, given: Sequence[str], now: float, grace: float) -> None:
        self._given = tuple(given)
        self._grace = grace
        self._learned_at = now
        self._answers: dict[str, ServerDescription] = {}
        self._failures: dict[str, str] = {}
        self._found: dict[int, str] = {}
        self._hints: dict[int, str] = {}
        self._asked: set[str] = set()

    @property
    def shards(self) -> int:
        """Number of shards by the answer with the newest shard count; 0 before the first answer."""
        newest = max(self._answers.values(), key=lambda answer: answer.reshard_count, default=None)
        return newest.shards if newest is not None else 0

    @property
    def complete(self) -> bool:
        """True once each shard has answered and belongs to the job."""
        return (
            bool(self._answers)
            and all(i in self._found for i in range(self.shards))
            and not self._strays()
        )

    def cluster(self) -> JobServers:
        """Return all servers of the job; call it once the search is complete."""
        return JobServers(
            self._answers[self._found[0]].job, tuple(self._found[i] for i in range(self.shards))
        )

    def to_ask(self) -> list[str]:
        """Return the servers that have not answered, or whose answer may change."""
        silent = [address for address in self._given if address not in self._answers]
        hinted = [address for shard, address in self._hints.items() if shard not in self._found]
        settled = [] if self.complete else list(self._found.values())
        asking = list(dict.fromkeys(silent + hinted + settled))
        self._asked.update(asking)
        return asking

    def has_unasked(self) -> bool:
        """Return whether a server was never asked; then the caller need not pause."""
        return not self._asked.issuperset(self._silent())

    def answered(self, address: str, answer: ServerDescription, now: float) -> None:
        """Record an answer. Raises MismatchError if it contradicts an earlier answer."""
        self._compare(address, answer)
        if self._answers.get(address) != answer:
            self._learned_at = now
        self._answers[address] = answer
        self._failures.pop(address, None)
        self._found.setdefault(answer.shard, address)
        for shard, hint in answer.hints().items():
            # Each shard reports its address to shard 0, so shard 0's addresses take precedence.
            if shard not in self._hints or answer.shard == 0:
                self._hints[shard] = hint

    def failed(self, address: str, why: str) -> None:
        """Record a failed request; an earlier answer of this address no longer counts."""
        self._failures[address] = why
        self._answers.pop(address, None)
        self._found = {shard: found for shard, found in self._found.items() if found != address}

    def introductions(self) -> list[tuple[str, str]]:
        """Return the shards that do not follow shard 0, once all shards are known.

        Each item is the address of a shard, and the address of shard 0 to send to it.
        """
        if 0 not in self._found or self._missing():
            return []
        leader = self._found[0]
        leader_address = self._answers[leader].own or leader
        return [
            (address, leader_address)
            for shard, address in self._followers()
            if not self._answers[address].coordinator
        ]

    def check(self, now: float) -> None:
        """Raise MismatchError if the search can no longer become complete."""
        if now - self._learned_at < self._grace or not self._answers or self._silent():
            return
        knows_leader = 0 in self._found or 0 in self._hints
        # A single given address that leads to shard 0 need not be the complete list, so other
        # servers may still be starting.
        if self._missing() and (len(self._given) > 1 or not knows_leader):
            raise self._incomplete()
        for shard, address in self._followers():
            self._compare_with_leader(shard, address)

    def gave_up(self, seconds: float) -> PSError:
        """Return the error of a search that is not complete after `seconds` seconds."""
        if silent := self._silent():
            failures = "; ".join(
                f"{address}: {self._failures.get(address, 'no answer')}" for address in silent
            )
            return UnreachableError(
                f"no answer within {seconds:.0f} s from {failures}", "UNREACHABLE"
            )
        if self._missing():
            return self._incomplete()
        strays = ", ".join(f"shard {shard} at {address}" for shard, address in self._strays())
        return UnreachableError(
            f"{strays} has not joined shard 0 at {self._found[0]} within {seconds:.0f} s",
            "UNREACHABLE",
        )

    def _compare(self, address: str, answer: ServerDescription) -> None:
        # After a reshard to fewer shards, a removed server may still run.
        leaves = answer.shard >= answer.shards and answer.reshard_count > 0
        if not (0 <= answer.shard < answer.shards or leaves):
            raise _mismatch(
                f"the server at {address} claims to be shard {answer.shard} of {answer.shards}"
            )
        for other, earlier in self._answers.items():
            if earlier.shards != answer.shards and earlier.reshard_count == answer.reshard_count:
                raise _mismatch(
                    f"{other} is shard {earlier.shard} of {earlier.shards}, but {address} is shard "
                    f"{answer.shard} of {answer.shards}: they are servers of different jobs"
                )
            if earlier.job and answer.job and earlier.job != answer.job and other != address:
                raise MismatchError(
                    f"{other} belongs to job {earlier.job}, but {address} belongs to job "
                    f"{answer.job}",
                    "JOB_MISMATCH",
                )
            one_process = other == address or (earlier.own and earlier.own == answer.own)
            if earlier.shard == answer.shard and not one_process:
                raise _mismatch(
                    f"{other} and {address} are both shard {answer.shard} of {answer.shards}. "
                    f"Try: {REMEDY}"
                )

    def _compare_with_leader(self, shard: int, address: str) -> None:
        leader = self._found.get(0, "")
        known = self._answers[leader].hints().get(shard, "") if leader else ""
        if known and known not in (address, self._answers[address].own):
            raise _mismatch(
                f"{address} claims to be shard {shard}, but shard 0 at {leader} knows {known} as "
                f"shard {shard}"
            )

    def _followers(self) -> list[tuple[int, str]]:
        return [(shard, address) for shard, address in sorted(self._found.items()) if shard]

    def _strays(self) -> list[tuple[int, str]]:
        """Return the servers that run but do not belong to the job yet."""
        joined = [(shard, at) for shard, at in sorted(self._found.items()) if shard < self.shards]
        return [(shard, at) for shard, at in joined if not self._answers[at].job]

    def _missing(self) -> list[int]:
        """Return the shards that have not answered and whose address is unknown."""
        return [
            shard
            for shard in range(self.shards)
            if shard not in self._found and shard not in self._hints
        ]

    def _silent(self) -> list[str]:
        """Return the known addresses that have not answered."""
        given = [address for address in self._given if address not in self._answers]
        hinted = [address for shard, address in self._hints.items() if shard not in self._found]
        return list(dict.fromkeys(given + hinted))

    def _incomplete(self) -> MismatchError:
        found = ", ".join(
            f"{address} is shard {shard}" for shard, address in sorted(self._found.items())
        )
        missing = self._missing()
        names = f"shard{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.shards}"
        return _mismatch(f"{found}; no server knows the address of {names}. Try: {REMEDY}")


def _mismatch(text: str) -> MismatchError:
    return MismatchError(text, "SHARD_MISMATCH")
