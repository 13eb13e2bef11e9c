"""Addresses of each shard's primary and standby, as far as a worker knows.

Theory of operation:

- `addresses` holds the server to ask for each shard; a second address may be its standby.
- `switch` swaps the two addresses when the first one does not answer or is not primary.
- A primary of a higher term replaces both addresses. A lower term changes nothing.
- In the same term only shard 0 may move a primary, which was then restarted elsewhere.
- Invariant: the term of a shard decreases only in `relocate`, where a new server takes the shard.
"""

import threading
from collections.abc import Sequence

from pscommon.core.errors import LayoutError, UnreachableError


class ServerAddresses:
    """Thread-safe table of server addresses by shard.

    Args:
        addresses: First server to ask, by shard.
        given: Addresses that the user listed, perhaps with those of standbys.

    Attributes:
        addresses: Server to ask, by shard.
        terms: Highest known term by shard.
    """

    def __init__(self, addresses: Sequence[str], given: Sequence[str] = ()) -> None:
        self.addresses: Sequence[str] = tuple(addresses)
        self._given = tuple(given)
        self._alternatives = [""] * len(self.addresses)
        self.terms = [0] * len(self.addresses)
        # Last address from shard 0. Empty for an address that the user gave: it may be another
        # name of the same server, and stays in use.
        self._from_shard_0 = [
            "" if address in self._given else address for address in self.addresses
        ]
        self._shards = len(self.addresses)  # size of the job by the newest answer
        self._lock = threading.Lock()

    @property
    def known_addresses(self) -> list[str]:
        """All known addresses, each once."""
        known = dict.fromkeys((*self._given, *self.addresses, *self._alternatives))
        return [address for address in known if address]

    def count(self, shards: int) -> bool:
        """Record the job's number of shards; return whether it equals the size of this table.

        shards: Number of shards; 0: unknown.
        """
        self._shards = shards or self._shards
        return shards == len(self.addresses)

    def check_shard_count(self) -> None:
        """Raise LayoutError if the job has another number of shards.

        Without this check, a worker could go on with a server that has left the job.
        """
        if self._shards != len(self.addresses):
            raise LayoutError(
                f"the job has {self._shards} servers now, not {len(self.addresses)}", "LAYOUT"
            )

    def learn_from_shard_0(self, shard: int, address: str, term: int, standby: str) -> set[str]:
        """Take the address of a primary from shard 0, as `learn` does.

        Shard 0 also knows a primary that was restarted at another address in the same term.
        """
        with self._lock:
            known, before = self.terms[shard], self._from_shard_0[shard]
            if not address and term == known:
                self._set_standby(shard, standby)
            if not address or term < known:
                return set()
            self._from_shard_0[shard] = address
            if known in (0, term) and before not in ("", address):
                self.terms[shard] = term
                return self._replace(shard, address, standby)
        return self.learn(shard, address, term, standby)

    def learn(self, shard: int, address: str, term: int, standby: str = "") -> set[str]:
        """Record the primary of a term and its standby; return the addresses that are void now."""
        with self._lock:
            known, current = self.terms[shard], self.addresses[shard]
            if not address or term < known:
                return set()
            self.terms[shard] = term
            if term == known or (not known and (term == 1 or address == current)):
                self._set_standby(shard, standby)
                return set()
            return self._replace(shard, address, standby)

    def _set_standby(self, shard: int, standby: str) -> None:
        """Record the standby, unless it is the server that is asked now."""
        if standby not in ("", self.addresses[shard]):
            self._alternatives[shard] = standby

    def _replace(self, shard: int, address: str, standby: str) -> set[str]:
        void = {self.addresses[shard], self._alternatives[shard]} - {address, standby, ""}
        self._set_address(shard, address)
        self._alternatives[shard] = standby
        return void

    def switch(self, shard: int, address: str) -> None:
        """Use the other server of the shard: `address` does not answer, or is not primary."""
        with self._lock:
            if self._alternatives[shard] and self.addresses[shard] == address:
                other, self._alternatives[shard] = self._alternatives[shard], address
                self._set_address(shard, other)

    def _set_address(self, shard: int, address: str) -> None:
        self.addresses = (*self.addresses[:shard], address, *self.addresses[shard + 1 :])

    def relocate(self, addresses: Sequence[str]) -> set[str]:
        """Replace the servers after a reshard; return the addresses that are void now."""
        with self._lock:
            before = dict(enumerate(self.addresses))
            stays = [before.get(shard) == address for shard, address in enumerate(addresses)]
            void = {*self.addresses} - {*addresses}
            self.terms = [
                self.terms[shard] if stays[shard] else 0 for shard in range(len(addresses))
            ]
            self._alternatives = [
                self._alternatives[shard] if stays[shard] else "" for shard in range(len(addresses))
            ]
            self.addresses, self._from_shard_0 = tuple(addresses), list(addresses)
            self._shards = len(addresses)
            return void

    def check(self, shard: int, term: int) -> None:
        """Record the term of an answer.

        Raises:
            UnreachableError: A higher term is known (NOT_PRIMARY).
        """
        with self._lock:
            if term < self.terms[shard]:
                newest = self.terms[shard]
                text = f"shard {shard} answered in term {term}, but its primary has term {newest}"
                raise UnreachableError(text, "NOT_PRIMARY")
            self.terms[shard] = term
