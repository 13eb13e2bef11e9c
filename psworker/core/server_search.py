"""Finding all servers of a job from some of their addresses, as a machine without a clock or a
socket.

Every server says which shard it is, of how many, and what addresses it knows. Asking goes on
until each shard has answered and follows shard 0, or until it is certain that this cannot
happen:

- two processes claim one shard, or two servers belong to different jobs or to sets of different sizes: at once;
- a shard that nobody knows, where nobody is left who could tell: when nothing new was learned for `grace` seconds.

Which servers are still starting is unknowable, so what merely has not happened yet is left to
the caller's deadline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pscommon.core.errors import MismatchError, PSError, UnreachableError

REMEDY = "list every server, or start the others with --join and the address of shard 0"
# what a server says that listens on all interfaces and was not told its name: no use from another
# machine
NOWHERE = ("0.0.0.0:", "[::]:")


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """A server's answer; empty job or coordinator: it does not know yet. addresses: by shard,
    empty where unknown.

    layout: how often the number of shards has changed, as far as it knows.
    """

    job: str
    shard: int
    shards: int
    addresses: tuple[str, ...]
    coordinator: str
    layout: int = 0

    @property
    def own(self) -> str:
        """The address that it wants to be known by."""
        return self.hints().get(self.shard, "")

    def hints(self) -> dict[int, str]:
        """Addresses that it knows, by shard."""
        known = [(0, self.coordinator), *enumerate(self.addresses)]
        return {
            shard: address
            for shard, address in known
            if address and not address.startswith(NOWHERE)
        }


@dataclass(frozen=True, slots=True)
class JobServers:
    """All servers of one job; addresses by shard."""

    job: str
    addresses: tuple[str, ...]


class ServerSearch:
    """The machine. Call order: ask what `to_ask` says, tell it by `answered` or `failed`, then
    `check`; repeat.
    """

    def __init__(self, given: Sequence[str], now: float, grace: float) -> None:
        self._given = tuple(given)
        self._grace = grace
        self._learned_at = now
        self._answers: dict[str, ServerDescription] = {}
        self._failures: dict[str, str] = {}
        self._places: dict[int, str] = {}
        self._hints: dict[int, str] = {}
        self._asked: set[str] = set()

    @property
    def shards(self) -> int:
        """How many shards the job has; 0 before the first answer. Who has heard of the last
        change knows best.
        """
        newest = max(self._answers.values(), key=lambda answer: answer.layout, default=None)
        return newest.shards if newest is not None else 0

    @property
    def complete(self) -> bool:
        return (
            bool(self._answers)
            and all(i in self._places for i in range(self.shards))
            and not self._strays()
        )

    def cluster(self) -> JobServers:
        """What was looked for, once `complete`."""
        return JobServers(
            self._answers[self._places[0]].job, tuple(self._places[i] for i in range(self.shards))
        )

    def to_ask(self) -> list[str]:
        """Servers that have not answered, or have more to tell."""
        silent = [address for address in self._given if address not in self._answers]
        hinted = [address for shard, address in self._hints.items() if shard not in self._places]
        settled = [] if self.complete else list(self._places.values())
        asking = list(dict.fromkeys(silent + hinted + settled))
        self._asked.update(asking)
        return asking

    def has_news(self) -> bool:
        """Is there an address that was never asked? Then there is no reason to pause."""
        return not self._asked.issuperset(self._silent())

    def answered(self, address: str, answer: ServerDescription, now: float) -> None:
        """MismatchError where this contradicts an earlier answer."""
        self._compare(address, answer)
        if self._answers.get(address) != answer:
            self._learned_at = now
        self._answers[address] = answer
        self._failures.pop(address, None)
        self._places.setdefault(answer.shard, address)
        for shard, hint in answer.hints().items():
            # shard 0 is told by every shard when it comes; others only know by hearsay
            if shard not in self._hints or answer.shard == 0:
                self._hints[shard] = hint

    def failed(self, address: str, why: str) -> None:
        """No answer from this address, this time: whoever had answered there may be gone, and
        another one may come.
        """
        self._failures[address] = why
        self._answers.pop(address, None)
        self._places = {shard: place for shard, place in self._places.items() if place != address}

    def introductions(self) -> list[tuple[str, str]]:
        """(address of a shard that follows nobody, address of shard 0 to tell it), once every
        shard is known.
        """
        if 0 not in self._places or self._missing():
            return []
        leader = self._places[0]
        told = self._answers[leader].own or leader
        return [
            (address, told)
            for shard, address in self._followers()
            if not self._answers[address].coordinator
        ]

    def check(self, now: float) -> None:
        """MismatchError if the set can no longer become complete."""
        if now - self._learned_at < self._grace or not self._answers or self._silent():
            return
        knows_leader = 0 in self._places or 0 in self._hints
        # of one address that leads to shard 0 nobody claimed that it was the whole set: the rest
        # may be starting
        if self._missing() and (len(self._given) > 1 or not knows_leader):
            raise self._incomplete()
        for shard, address in self._followers():
            self._compare_with_leader(shard, address)

    def gave_up(self, seconds: float) -> PSError:
        """Why the search is not complete after so long."""
        if silent := self._silent():
            whom = "; ".join(
                f"{address}: {self._failures.get(address, 'no answer')}" for address in silent
            )
            return UnreachableError(f"no answer within {seconds:.0f} s from {whom}", "UNREACHABLE")
        if self._missing():
            return self._incomplete()
        strays = ", ".join(f"shard {shard} at {address}" for shard, address in self._strays())
        return UnreachableError(
            f"{strays} has not joined shard 0 at {self._places[0]} within {seconds:.0f} s",
            "UNREACHABLE",
        )

    def _compare(self, address: str, answer: ServerDescription) -> None:
        leaves = (
            answer.shard >= answer.shards and answer.layout > 0
        )  # there are fewer now, and it still has to end
        if not (0 <= answer.shard < answer.shards or leaves):
            raise _mismatch(
                f"the server at {address} says that it is shard {answer.shard} of {answer.shards}"
            )
        for other, earlier in self._answers.items():
            if earlier.shards != answer.shards and earlier.layout == answer.layout:
                raise _mismatch(
                    f"{other} is shard {earlier.shard} of {earlier.shards}, but {address} is "
                    f"shard {answer.shard} of "
                    f"{answer.shards}: they are not servers of one job"
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
                    f"{other} and {address} are both shard {answer.shard} of {answer.shards}: "
                    f"{REMEDY}"
                )

    def _compare_with_leader(self, shard: int, address: str) -> None:
        leader = self._places.get(0, "")
        known = self._answers[leader].hints().get(shard, "") if leader else ""
        if known and known not in (address, self._answers[address].own):
            raise _mismatch(
                f"{address} says that it is shard {shard}, but shard 0 at {leader} works with "
                f"{known} as that"
            )

    def _followers(self) -> list[tuple[int, str]]:
        return [(shard, address) for shard, address in sorted(self._places.items()) if shard]

    def _strays(self) -> list[tuple[int, str]]:
        """Servers that are up but not part of the job yet."""
        here = [(shard, at) for shard, at in sorted(self._places.items()) if shard < self.shards]
        return [(shard, at) for shard, at in here if not self._answers[at].job]

    def _missing(self) -> list[int]:
        """Shards that have not answered and whose address nobody knows."""
        return [
            shard
            for shard in range(self.shards)
            if shard not in self._places and shard not in self._hints
        ]

    def _silent(self) -> list[str]:
        """Addresses that should answer and do not."""
        given = [address for address in self._given if address not in self._answers]
        hinted = [address for shard, address in self._hints.items() if shard not in self._places]
        return list(dict.fromkeys(given + hinted))

    def _incomplete(self) -> MismatchError:
        found = ", ".join(
            f"{address} is shard {shard}" for shard, address in sorted(self._places.items())
        )
        missing = self._missing()
        names = f"shard{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.shards}"
        return _mismatch(f"{found}; nobody knows where {names} is: {REMEDY}")


def _mismatch(text: str) -> MismatchError:
    return MismatchError(text, "SHARD_MISMATCH")
