"""A shard's call of CoordinatorService.LinkShard: over a stream, else over gRPC."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from pscommon.core.errors import PSError
from pscommon.security.credentials import process_credentials
from pscommon.settings.values import Lanes
from pscommon.telemetry.logs import get_logger
from pscommon.wire.blocking_socket import BlockingSocket, socket_addresses
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import DESCRIBE, LINK_SHARD, Stub, call
from pscommon.wire.status import error_from
from psproto.v1 import coordinator_pb2 as pb
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2

LINK_CONNECT_SECONDS = 1.0
"""Time for shard 0 to describe itself, and to accept a stream."""

LINK_SILENCE_SECONDS = 3.0
"""Time without a byte after which the connection is lost; shard 0 sends an update every second."""

MakeRequest = Callable[[], pb.LinkShardRequest]

log = get_logger(__name__)


class LinkEndedError(Exception):
    """The call has ended.

    Attributes:
        error: Why.
    """

    def __init__(self, error: PSError) -> None:
        super().__init__(str(error))
        self.error = error


class GrpcLink:
    """The call over gRPC.

    Attributes:
        sends_news: Requests and responses have only what has changed, and everything once a second.
    """

    sends_news = False

    def __init__(self, address: str) -> None:
        self._who = f"shard 0 at {address}"
        self._channel = open_channel(Endpoint(address))
        self._call: Any = None

    def follow(self, requests: Iterator[MakeRequest]) -> Iterator[pb.LinkShardResponse]:
        """Make and send the requests as they come, and yield the responses.

        Raises LinkEndedError.
        """
        self._call = Stub(self._channel, LINK_SHARD)(make() for make in requests)
        try:
            yield from self._call
        except grpc.RpcError as failure:
            raise LinkEndedError(error_from(failure, self._who)) from failure

    def try_send_message(self, make: MakeRequest) -> bool:
        """Return False: requests over gRPC wait for its threads."""
        return False

    def cancel(self) -> None:
        """End the call. From any thread."""
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        self._channel.close()


class SocketLink(BlockingSocket):
    """The call over a stream. Attributes: as GrpcLink."""

    sends_news = True

    def follow(self, requests: Iterator[MakeRequest]) -> Iterator[pb.LinkShardResponse]:
        """As GrpcLink."""
        self.limit_silence(LINK_SILENCE_SECONDS)
        sender = threading.Thread(
            target=self._send_all, args=(requests,), name="link-sender", daemon=True
        )
        sender.start()
        try:
            yield from self.messages(pb.LinkShardResponse)
        except OSError as error:
            raise LinkEndedError(self.lost(error)) from error
        except PSError as error:
            raise LinkEndedError(error) from error

    def _send_all(self, requests: Iterator[MakeRequest]) -> None:
        try:
            for make in requests:
                if self.is_broken:
                    return
                self.send_message(make)
        except OSError as error:
            log.debug("link_send_failed", problem=str(error))
            self.cancel()

    def close(self) -> None:
        self.cancel()
        super().close()


def open_link(address: str, lanes: Lanes) -> GrpcLink | SocketLink:
    """Connect to shard 0, over a stream if both servers allow it and its port answers.

    Raises UnreachableError if shard 0 does not answer at all.
    """
    if lanes == "grpc":
        return GrpcLink(address)
    who = f"shard 0 at {address}"
    with open_channel(Endpoint(address)) as channel:
        description = call(channel, DESCRIBE, ps.DescribeRequest(), LINK_CONNECT_SECONDS, who)
    hello = stream_pb2.StreamHello(purpose=stream_pb2.StreamHello.PURPOSE_SHARD)
    for found in socket_addresses(description, address, lanes):
        if process_credentials().tls is not None and not Endpoint(found).is_path:
            continue  # a link sends and receives at the same time, which TLS does not allow
        try:
            return SocketLink.open(found, hello, who, LINK_CONNECT_SECONDS)
        except PSError as error:
            log.info("link_without_stream", problem=str(error))
    return GrpcLink(address)
