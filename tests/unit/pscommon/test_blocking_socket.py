"""Connecting to a stream port within a time."""

import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import UnreachableError
from pscommon.core.formats import WIRE_FORMAT
from pscommon.wire.blocking_socket import BlockingSocket
from pscommon.wire.stream_format import MAGIC, FrameKind, encode_frame
from psproto.v1 import stream_pb2

WELCOME = stream_pb2.StreamWelcome(format=WIRE_FORMAT).SerializeToString()
HELLO = stream_pb2.StreamHello(job="otter", worker=1)


def test_a_unix_socket_that_accepts_no_connection_is_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        listening.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(path)  # the queue is full

        with pytest.raises(UnreachableError, match=f"at {path}: no answer"):
            BlockingSocket.open(path, HELLO, "shard 0", 0.1)


def test_all_addresses_of_a_host_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def resolved(host: str, *arguments: Any, **options: Any) -> Any:
        names = ["127.0.0.2", "127.0.0.1"] if host == "servers" else [host]
        return [found for name in names for found in resolve(name, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def welcome() -> None:
            with listening.accept()[0] as sock:
                sock.sendall(MAGIC + encode_frame(FrameKind.WELCOME, WELCOME))
                sock.recv(1 << 16)

        server = threading.Thread(target=welcome, daemon=True)
        server.start()
        stream = BlockingSocket.open(f"servers:{listening.getsockname()[1]}", HELLO, "shard 0")
        stream.close()
        server.join()

    assert stream.hello == HELLO
