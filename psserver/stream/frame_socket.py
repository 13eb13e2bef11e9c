"""Frames over a stream socket."""

from pscommon.core.errors import PSError
from pscommon.wire.status import status_of
from pscommon.wire.stream_format import (
    HEAD_BYTES,
    MAX_FRAME_MESSAGE_BYTES,
    PIECE_BYTES,
    FrameKind,
    FramePrefix,
    decode_prefix,
    encode_frame,
)
from psserver.stream.stream_socket import StreamSocket


class FrameSocket(StreamSocket):
    """A stream socket that receives and sends frames."""

    async def receive_frame(
        self, most_nbytes: int = MAX_FRAME_MESSAGE_BYTES
    ) -> tuple[FramePrefix, bytes]:
        """Return the next frame's prefix and message; its data are not received yet.

        most_nbytes: The longest message that is taken.

        Raises InvalidRequestError if it is no frame, ConnectionLostError or OSError.
        """
        head = bytearray(HEAD_BYTES)
        await self.receive([head])
        prefix = decode_prefix(head, most_nbytes)
        rest = bytearray(prefix.rest_nbytes)
        if rest:
            await self.receive([rest])
        return prefix, prefix.message(head, rest)

    async def discard(self, nbytes: int) -> None:
        """Receive bytes and drop them."""
        while nbytes > 0:
            await self.receive([bytearray(min(nbytes, PIECE_BYTES))])
            nbytes -= PIECE_BYTES

    async def send_frame(self, kind: FrameKind, message: bytes = b"", data: bytes = b"") -> None:
        await self.send([encode_frame(kind, message, len(data)), data])

    async def send_error(self, error: PSError) -> None:
        await self.send_frame(FrameKind.ERROR, status_of(error).SerializeToString())

    async def send_prefix(self, kind: FrameKind, message: bytes, data_nbytes: int) -> None:
        """Send a frame without its data, which follow."""
        await self.send([encode_frame(kind, message, data_nbytes)])
