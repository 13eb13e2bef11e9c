"""Where each shard's primary is, as far as a worker knows: one that is silent may have been
followed by its standby.
"""

import threading
from collections.abc import Sequence

from pscommon.core.errors import LayoutError, UnreachableError


class Endpoints:
    """By shard. Thread-safe. addresses: whom to ask now. given: those that the user listed,
    perhaps with standbys.
    """

    def __init__(self, addresses: Sequence[str], given: Sequence[str] = ()) -> None:
        self.addresses: Sequence[str] = tuple(addresses)
        self._given = tuple(given)
        self._others = [""] * len(self.addresses)
        self._terms = [0] * len(self.addresses)  # the highest that was heard of
        # as shard 0 last said; the user may have given another name of the same server, which is as
        # good
        self._told = ["" if address in self._given else address for address in self.addresses]
        self._shards = len(self.addresses)  # that the job has, as far as anybody has said
        self._lock = threading.Lock()

    @property
    def known(self) -> list[str]:
        """All addresses at which somebody may know more."""
        return list(
            dict.fromkeys(
                address for address in (*self._given, *self.addresses, *self._others) if address
            )
        )

    def term(self, shard: int) -> int:
        """The highest that was heard of."""
        return self._terms[shard]

    def count(self, shards: int) -> bool:
        """The job has so many; 0: that was not said. True: these are as many."""
        self._shards = shards or self._shards
        return shards == len(self.addresses)

    def check_layout(self) -> None:
        """LayoutError if the job has another number of servers. One that has left may be the
        only one still asked.
        """
        if self._shards != len(self.addresses):
            raise LayoutError(
                f"the job has {self._shards} servers by now, not {len(self.addresses)}", "LAYOUT"
            )

    def told(self, shard: int, address: str, term: int, standby: str) -> set[str]:
        """As `learn`, from shard 0, which also knows of a primary that was started again
        elsewhere in the same term.
        """
        with self._lock:
            known, before = self._terms[shard], self._told[shard]
            if not address and term == known:
                self._remember(shard, standby)
            if not address or term < known:
                return set()
            self._told[shard] = address
            if known in (0, term) and before not in ("", address):
                self._terms[shard] = term
                return self._move(shard, address, standby)
        return self.learn(shard, address, term, standby)

    def learn(self, shard: int, address: str, term: int, standby: str = "") -> set[str]:
        """The primary of this term is there, and its standby. Returns addresses at which it is
        not any more.
        """
        with self._lock:
            known, current = self._terms[shard], self.addresses[shard]
            if not address or term < known:
                return set()
            self._terms[shard] = term
            if term == known or (not known and (term == 1 or address == current)):
                self._remember(shard, standby)
                return set()
            return self._move(shard, address, standby)

    def _remember(self, shard: int, standby: str) -> None:
        """The other one to ask. Who is asked now, since the primary did not answer, is not to
        take that one's place.
        """
        if standby not in ("", self.addresses[shard]):
            self._others[shard] = standby

    def _move(self, shard: int, address: str, standby: str) -> set[str]:
        void = {self.addresses[shard], self._others[shard]} - {address, standby, ""}
        self._go(shard, address)
        self._others[shard] = standby
        return void

    def failed(self, shard: int, address: str) -> None:
        """Nobody answers there, or somebody who is not primary: ask the other one next."""
        with self._lock:
            if self._others[shard] and self.addresses[shard] == address:
                other, self._others[shard] = self._others[shard], address
                self._go(shard, other)

    def _go(self, shard: int, address: str) -> None:
        self.addresses = (*self.addresses[:shard], address, *self.addresses[shard + 1 :])

    def relocate(self, addresses: Sequence[str]) -> set[str]:
        """The job has these servers from now on, of as many shards. Returns addresses at which
        none of them is.
        """
        with self._lock:
            before = dict(enumerate(self.addresses))
            stays = [before.get(shard) == address for shard, address in enumerate(addresses)]
            gone = {*self.addresses} - {*addresses}
            self._terms = [
                self._terms[shard] if stays[shard] else 0 for shard in range(len(addresses))
            ]
            self._others = [
                self._others[shard] if stays[shard] else "" for shard in range(len(addresses))
            ]
            self.addresses, self._told = tuple(addresses), list(addresses)
            self._shards = len(addresses)
            return gone

    def check(self, shard: int, term: int) -> None:
        """An answer of this term has come. NOT_PRIMARY: there is a higher one."""
        with self._lock:
            if term < self._terms[shard]:
                text = f"shard {shard} answered in term {term}, and there is a primary of term {self._terms[shard]}"
                raise UnreachableError(text, "NOT_PRIMARY")
            self._terms[shard] = term
