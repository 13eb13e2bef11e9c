"""A stream socket notices that its peer hangs up while no bytes are received or sent."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from psserver.sockets.frame_socket import FrameSocket

SECONDS = 10.0

Serve = Callable[[FrameSocket, socket.socket], Awaitable[None]]


async def turn(count: int) -> None:
    """Let the loop handle what it knows of its sockets."""
    for _ in range(count):
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(done.set_result, None)
        await done


async def hang_up(serve: Serve) -> None:
    """Let the peer hang up after `serve`, and wait until the stream socket reports it."""
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    one, peer = socket.socketpair()
    with peer:
        one.setblocking(False)
        stream = FrameSocket(one, loop, lost.set)
        try:
            await serve(stream, peer)
            await turn(5)
            assert not lost.is_set()
            peer.shutdown(socket.SHUT_RDWR)
            await asyncio.wait_for(lost.wait(), SECONDS)
        finally:
            stream.close()


async def receive_in_one_go(stream: FrameSocket, peer: socket.socket) -> None:
    """Both buffers are there before they are wanted."""
    peer.sendall(bytes(20))
    await turn(1)
    for _ in range(2):
        await stream.receive([bytearray(10)])


async def receive_while_the_rest_is_known(stream: FrameSocket, peer: socket.socket) -> None:
    """The loop learns of the second buffer's bytes before they are received, and looks after."""
    first = asyncio.ensure_future(stream.receive([bytearray(10)]))
    await turn(1)
    peer.sendall(bytes(20))
    await first
    await stream.receive([bytearray(10)])


async def receive_late(stream: FrameSocket, peer: socket.socket) -> None:
    """No coroutine wants the bytes for a while."""
    peer.sendall(bytes(20))
    await turn(5)
    await stream.receive([bytearray(20)])


async def send(stream: FrameSocket, peer: socket.socket) -> None:
    await stream.send([bytes(20)])


@pytest.mark.parametrize(
    "serve", [receive_in_one_go, receive_while_the_rest_is_known, receive_late, send]
)
def test_a_hang_up_is_noticed(serve: Serve) -> None:
    asyncio.run(hang_up(serve))


def test_a_hang_up_is_reported_once() -> None:
    """The socket stays readable while the stream's task ends: the loop would spin."""

    async def count_reports() -> int:
        reports = list[int]()
        one, peer = socket.socketpair()
        one.setblocking(False)
        stream = FrameSocket(one, asyncio.get_running_loop(), lambda: reports.append(1))
        peer.close()
        await turn(20)
        stream.close()
        return len(reports)

    assert asyncio.run(count_reports()) == 1
