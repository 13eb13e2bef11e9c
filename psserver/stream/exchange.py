"""One exchange over a stream: receive a push, wait for its decision, send weights.

Nothing here waits in a thread. Short work runs in the event loop. What waits for a disk, a standby
or a long update runs in a pool of threads.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from pscommon.core.errors import InFlightError, InvalidRequestError
from pscommon.core.log_entries import PushKey
from pscommon.wire.status import error_for_peer
from pscommon.wire.stream_format import EAGER_BYTES, FrameKind, decode_message
from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.memory_budget import MemoryClaim
from psserver.parameters.staging import Staging
from psserver.stream.frame_socket import FrameSocket
from psserver.stream.stream_service import StreamService
from psserver.stream.stream_socket import ConnectionLostError
from psserver.stream.wakeup import Wakeup
from psserver.transfer.push_receiver import OpenPushReceiver


class StreamExchange:
    """One exchange.

    header: header of the request.
    data_nbytes: bytes of data that the worker has announced.
    """

    def __init__(
        self,
        service: StreamService,
        socket: FrameSocket,
        header: pb.PushPullHeader,
        data_nbytes: int,
    ) -> None:
        self._service, self._engine, self._socket = service, service.engine, socket
        self._header, self._data_nbytes = header, data_nbytes
        # what the worker sends without waiting for GO, and is not read yet
        self._unread_nbytes = data_nbytes if data_nbytes <= EAGER_BYTES else 0
        self._loop = asyncio.get_running_loop()
        self._wakeup = Wakeup(self._loop)

    async def run(self) -> None:
        """Carry out the exchange and answer it; errors are answered too.

        Raises ConnectionLostError or OSError if the connection is lost.
        """
        try:
            with self._service.timing("Exchange"):
                await self._run()
        except (ConnectionLostError, OSError):
            raise
        except Exception as failure:
            await self._socket.discard(self._unread_nbytes)
            await self._socket.send_error(error_for_peer(failure))

    async def _run(self) -> None:
        header, engine, steps = self._header, self._engine, self._service.steps
        key, seconds = steps.begin(header)
        is_duplicate = (
            key is not None and header.has_data and await self._receive_push(key, seconds)
        )
        await self._wait(
            lambda: not engine.must_wait(key, header.min_version), seconds, engine.awaited_push(key)
        )
        outcome = engine.find_outcome(key, header.min_version)
        result = await self._service.do(
            partial(steps.make_result, header, key, outcome, is_duplicate)
        )
        if not result.pulled or header.memory:
            await self._socket.send_frame(FrameKind.RESULT, result.SerializeToString())
        else:
            await self._send_weights(result, seconds)

    # ---- the push --------------------------------------------------------------------------------

    async def _receive_push(self, key: PushKey, seconds: float) -> bool:
        """Receive and stage a push. Return whether it was decided before."""
        is_decided = self._engine.find_repeat(key)
        if is_decided is not None:
            await self._discard_data()
            return is_decided
        staging = await self._allocate(seconds)
        try:
            await self._fill(staging)
            self._service.steps.check_push(self._header, staging)
        except BaseException:
            self._engine.release(staging)
            raise
        return await self._service.do(
            partial(self._service.steps.stage, key, self._header, staging)
        )

    async def _discard_data(self) -> None:
        nbytes, self._unread_nbytes = self._unread_nbytes, 0
        await self._socket.discard(nbytes)

    async def _allocate(self, seconds: float) -> Staging:
        """Return memory for the push, once the model is known and the budget has room."""
        header, live, budget = self._header, self._engine.live, self._engine.traffic.budget
        allocator = self._service.steps.allocator
        await self._wait(lambda: live.store is not None or bool(live.stop_reason), seconds, None)
        store = live.require_store(header.shards)
        if header.memory:
            return allocator.in_memory(header, store)
        nbytes = allocator.network_nbytes(header, store)
        claim = budget.request(header.worker, nbytes, self._wakeup.wake)
        if not await self._granted(claim, seconds):
            raise budget.full(claim)
        return allocator.allocate(header, store, claim)

    async def _fill(self, staging: Staging) -> None:
        """Receive the data of a push."""
        if self._header.open:
            receiver = OpenPushReceiver(staging)
            await self._socket.send_frame(FrameKind.GO)
            await self._receive_open(receiver)
        elif not self._header.memory:
            if self._data_nbytes != staging.nbytes:
                raise InvalidRequestError(
                    f"the push has {self._data_nbytes} bytes, but its tensors {staging.nbytes}"
                )
            if self._data_nbytes > EAGER_BYTES:
                await self._socket.send_frame(FrameKind.GO)
            await self._socket.receive(staging.views, partial(self._record_filled, staging))
            self._unread_nbytes = 0

    def _record_filled(self, staging: Staging, nbytes: int) -> None:
        staging.mark_filled(nbytes)
        self._engine.traffic.transfer.note_request(self._header.worker)

    async def _receive_open(self, receiver: OpenPushReceiver) -> None:
        """Receive the pieces of a push that begins before it is complete, and its end."""
        while True:
            prefix, message = await self._socket.receive_frame()
            self._engine.traffic.transfer.note_request(self._header.worker)
            if prefix.kind is FrameKind.DATA:
                self._unread_nbytes = prefix.data_nbytes
                await self._socket.receive(receiver.views_at(prefix.offset, prefix.data_nbytes))
                self._unread_nbytes = 0
                receiver.received(prefix.offset, prefix.data_nbytes)
            elif prefix.kind is FrameKind.CLOSE:
                closing = decode_message(pb.PushPullHeader, message)
                receiver.close(closing.absent)
                self._header.MergeFrom(closing)
                return
            else:
                raise InvalidRequestError(f"a frame of kind {prefix.kind.name} in an open push")

    # ---- the weights -----------------------------------------------------------------------------

    async def _send_weights(self, result: pb.ExchangeResult, seconds: float) -> None:
        header, pulls = self._header, self._service.steps.pulls
        nbytes = self._engine.live.require_store().step_nbytes
        if nbytes <= EAGER_BYTES and header.pull != pb.PULL_ALL:
            weights = await self._service.do(partial(pulls.read_all, header, result))
            message = result.SerializeToString()
            await self._socket.send_frame(FrameKind.RESULT, message, [weights])
            return
        try:
            async with self._borrowed(nbytes, seconds):
                read = await self._service.do(
                    partial(pulls.read, header, result), abandoned=lambda read: read.close()
                )
                self._engine.traffic.transfer.count_sent(read.nbytes)
                try:
                    await self._socket.send_prefix(
                        FrameKind.RESULT, result.SerializeToString(), read.nbytes
                    )
                    await self._socket.send_from(read)
                finally:
                    read.close()
        except InFlightError as full:
            pending = self._service.steps.make_pending(str(full))
            await self._socket.send_frame(FrameKind.RESULT, pending.SerializeToString())

    @asynccontextmanager
    async def _borrowed(self, nbytes: int, seconds: float) -> AsyncIterator[None]:
        budget = self._engine.traffic.budget
        claim = budget.request(self._header.worker, nbytes, self._wakeup.wake)
        if not await self._granted(claim, seconds):
            raise budget.full(claim)
        try:
            yield
        finally:
            budget.release(claim)

    # ---- waiting ---------------------------------------------------------------------------------

    async def _wait(self, done: Callable[[], bool], seconds: float, push: PushKey | None) -> bool:
        """Wait for a change of the shard, or of one push; return False after `seconds`."""
        if done():
            return True
        with self._engine.live.changed.watch(push, self._wakeup.wake):
            return await self._wakeup.until(done, seconds)

    async def _granted(self, claim: MemoryClaim, seconds: float) -> bool:
        """Wait for a claim on the memory budget; withdraw it if it is not granted in time."""
        budget, is_granted = self._engine.traffic.budget, False
        try:
            is_granted = await self._wakeup.until(lambda: budget.try_grant(claim), seconds)
        finally:
            if not is_granted:
                budget.withdraw(claim)
        return is_granted
