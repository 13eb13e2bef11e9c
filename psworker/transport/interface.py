"""The interface through which a worker's requests reach the servers.

Implementations: `GrpcTransport` for servers in other processes, `psworker.simulation` for servers
in this process. The layers above are the same over both.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pscommon.wire.frames import Frame
from pscommon.wire.requests import A, Q, Request
from psproto.v1 import parameter_server_pb2 as ps
from psworker.core.clock import Clock
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation, ExchangeAnswer


class Transport(Protocol):
    """Requests to the coordinator and to each shard.

    All methods raise PSErrors. `timeout` is the deadline of one call in seconds.

    Attributes:
        direct: Calls run in the caller's thread; there are no other threads and no heartbeats.
        clock: Source of all times and pauses of the client.
        addresses: Server addresses by shard.
    """

    direct: bool
    clock: Clock

    @property
    def addresses(self) -> Sequence[str]: ...

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None:
        """Take the addresses that shard 0 knows.

        A primary with a higher term, or one restarted elsewhere, replaces the known addresses.

        Args:
            job: The job's identifier.
            addresses: Primaries by shard; empty where shard 0 knows none. Such a shard may not
                know shard 0 either.
            terms: Terms by shard; 0 where unknown.
            standbys: Standbys by shard; empty where unknown.
        """
        ...

    def find_primaries(self, job: str, timeout: float) -> bool:
        """Ask all known servers which of them are primaries; return whether a primary is new.

        For use while the coordinator does not answer.
        """
        ...

    def end_stalled(self) -> None:
        """End the exchanges that have moved no bytes for their timeout; call it periodically."""
        ...

    def answers(self, timeout: float) -> bool:
        """Probe all shards at the same time; return whether all answered within the timeout."""
        ...

    def end_calls(self) -> None:
        """End all calls in flight as if no server answered. Later calls work as usual."""
        ...

    def request(self, row: Request[Q, A], message: Q, timeout: float, shard: int = 0) -> A:
        """Return a server's answer to one request. shard: The server's; 0 has the coordinator."""
        ...

    def relocate(self, addresses: Sequence[str]) -> bool:
        """Replace the servers after a reshard by those that shard 0 knows.

        Shard 0 keeps its address, and no exchange may be under way.

        Returns:
            False if the servers are the same, or shard 0 does not know all addresses yet.
        """
        ...

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None,
    ) -> ExchangeAnswer:
        """Make one Exchange call. After an error the receiver's memory may be partly written.

        Args:
            shard: Index of the shard.
            header: Header of the request.
            send: Bytes to send, if header.has_data is set.
            receiver: Memory for the bytes of the answer.
            timeout: Deadline in seconds.
            cancellation: Ends the call from another thread.
            frames: Frames of an open push, to send instead of `header` and `send`.
        """
        ...

    def offer_memory(
        self, shard: int, header: ps.PushPullHeader, share: Callable[[], int], timeout: float
    ) -> None:
        """Let a server on this host map the worker's memory.

        Args:
            shard: Index of the shard.
            header: Names the job, the worker and the number of the memory.
            share: Returns the memory's descriptor; called if the server can be reached.
            timeout: Deadline in seconds.

        Raises:
            InvalidRequestError: The server cannot use it; the message has the reason.
        """
        ...

    def worker_key(self, worker: int) -> bytes:
        """Return the key of a worker as which this process has joined; empty: it has none."""
        ...

    def close(self) -> None: ...
