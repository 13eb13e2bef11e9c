"""Flat buffers: the memory behind a model's tensors, and copies to and from client memory.

On the CPU both are the same memory. On a GPU, and when weights arrive while the model computes,
bytes are copied between the two.
"""

import ctypes
import weakref
from collections.abc import Sequence
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from pscommon.core.model_spec import TensorSpec
from pscommon.core.partition import ByteRange

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for bitwise comparison, by item size in bytes."""

COPY_PIECE_BYTES = 32 << 20
"""A GPU copies one piece while the host copies another one."""

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class CopyEvent(Protocol):
    """Completion of a copy: the part of torch.cuda.Event used here."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class _CopyDone:
    """A copy that has completed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""


class FlatBuffer:
    """Client memory and the bytes behind the model's tensors; here both are the same.

    Attributes:
        memory: Client memory.
        host: `memory` as a uint8 tensor.
        model_bytes: The bytes that the model's tensors are views of, uint8.
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.host = self.model_bytes = tensor_of(memory)

    def view(self, extent: ByteRange, tensor: TensorSpec) -> Tensor:
        """Return a typed and shaped view of the tensor's bytes on the model's side.

        Each view has its own storage: torch.save writes whole storages, and refuses a storage with
        tensors of several dtypes.
        """
        storage = self.model_bytes.untyped_storage()[extent.start : extent.stop]
        flat = torch.empty(0, dtype=_dtype(tensor.dtype), device=self.model_bytes.device).set_(
            storage
        )
        return flat.view(tensor.shape)

    def to_host(self, ranges: Sequence[ByteRange]) -> CopyEvent:
        """Start copying byte ranges to client memory, ordered after the model's queued work."""
        return _CopyDone()

    def from_host(self, ranges: Sequence[ByteRange]) -> None:
        """Copy byte ranges to the model, visible to its next operation.

        Call `wait_until_read` before copying the same bytes a second time.
        """

    def join(self) -> None:
        """Make the current stream wait for the last `from_host`, even on a different stream."""

    def wait_until_read(self) -> None:
        """Wait until the last `from_host` has read its source."""

    def are_equal(self, views: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
        """Return, for each view, whether it holds the same bytes as its tensor."""
        return list(map(_is_equal, views, tensors))


class DoubleBuffer(FlatBuffer):
    """A flat buffer with a separate copy for the model.

    The client can receive new weights while the model computes with the old ones.
    """

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self.model_bytes = torch.zeros_like(self.host)

    def to_host(self, ranges: Sequence[ByteRange]) -> CopyEvent:
        for start, stop in ranges:
            self.host[start:stop].copy_(self.model_bytes[start:stop])
        return _CopyDone()

    def from_host(self, ranges: Sequence[ByteRange]) -> None:
        for start, stop in ranges:
            self.model_bytes[start:stop].copy_(self.host[start:stop])


class HostCopy:
    """A copy from a GPU to memory that the GPU cannot reach.

    The GPU copies piece after piece to pinned memory. `query` or `synchronize` then copies to the
    target, each piece while the GPU copies the next one.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[CopyEvent, ByteRange]],
        source: Tensor,
        target: Tensor,
    ) -> None:
        self._pieces = pieces
        self._source, self._target = source, target

    def query(self) -> bool:
        if not all(done.query() for done, _ in self._pieces[-1:]):
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        for done, (start, stop) in self._pieces:
            done.synchronize()
            if self._target is not self._source:
                self._target[start:stop].copy_(self._source[start:stop])
        self._pieces = ()


class CudaBuffer(FlatBuffer):
    """A flat buffer whose model side is on a GPU.

    A separate stream copies between the GPU and pinned memory. That is client memory itself if it
    is pinned (see `pin`), which excludes steps that overlap. Other client memory has a pinned
    mirror: memory that is shared with servers may be remapped at any time.

    The copy stream waits, on the GPU, for the work queued on the model's stream. The host waits
    only where it needs the bytes, so the model keeps computing.
    """

    def __init__(self, memory: memoryview, device: torch.device, stop: int | None = None) -> None:
        """Allocate the buffers. stop: Number of leading bytes that the GPU holds; None: all."""
        super().__init__(memory)
        nbytes = memory.nbytes if stop is None else stop
        self.model_bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._pinned = (
            self.host
            if self.host.is_pinned()
            else torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        )
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last_copy: CopyEvent = _CopyDone()

    def to_host(self, ranges: Sequence[ByteRange]) -> CopyEvent:
        self._follow_model()
        pieces = [
            (self._copy(self._pinned, self.model_bytes, piece), piece) for piece in _pieces(ranges)
        ]
        return HostCopy(pieces, self._pinned, self.host)

    def from_host(self, ranges: Sequence[ByteRange]) -> None:
        self._follow_model()
        for start, stop in _pieces(ranges):
            if self._pinned is not self.host:
                self._pinned[start:stop].copy_(self.host[start:stop])
            self._last_copy = self._copy(self.model_bytes, self._pinned, ByteRange(start, stop))
        torch.cuda.current_stream(self.model_bytes.device).wait_stream(self._stream)

    def join(self) -> None:
        # from_host only makes its current stream wait, and a script may use several streams;
        # a stream in graph capture must not query an event recorded before the capture
        if not torch.cuda.is_current_stream_capturing() and not self._last_copy.query():
            torch.cuda.current_stream(self.model_bytes.device).wait_event(self._last_copy)  # type: ignore[arg-type]

    def wait_until_read(self) -> None:
        self._last_copy.synchronize()

    def are_equal(self, views: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
        return are_equal_on_device(views, tensors)

    def _follow_model(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.model_bytes.device))

    def _copy(self, into: Tensor, out_of: Tensor, piece: ByteRange) -> CopyEvent:
        start, stop = piece
        with torch.cuda.stream(self._stream):
            into[start:stop].copy_(out_of[start:stop], non_blocking=True)
        done: CopyEvent = self._stream.record_event()
        return done


def _pieces(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Return the ranges in pieces of at most COPY_PIECE_BYTES."""
    return [
        ByteRange(first, min(first + COPY_PIECE_BYTES, stop))
        for start, stop in ranges
        for first in range(start, stop, COPY_PIECE_BYTES)
    ]


def pin(memory: memoryview) -> bool:
    """Let GPUs copy from and to memory directly, as long as it exists. Return whether they can.

    memory: Memory that is never remapped; it may be shared between processes.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, all_gpus = tensor_of(memory).data_ptr(), 1  # cudaHostRegisterPortable
    if not memory.nbytes or int(cudart.cudaHostRegister(address, memory.nbytes, all_gpus)):
        return False
    # called before the memory is unmapped: the finalizer that was made last runs first
    weakref.finalize(memory.obj, cudart.cudaHostUnregister, address).atexit = False
    return True


def _is_comparable(view: Tensor, tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype is view.dtype


def _is_equal(view: Tensor, tensor: Tensor) -> bool:
    if not _is_comparable(view, tensor):
        return False
    # memcmp compares bits at memory speed: torch.equal is slower, and 0. equals -0. there
    dense = tensor.contiguous()
    return not _libc.memcmp(view.data_ptr(), dense.data_ptr(), view.nbytes)


def are_equal_on_device(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
    """Return the result of `FlatBuffer.are_equal` after one synchronization with the device."""
    comparable = list(map(_is_comparable, views, tensors))
    differ = [
        torch.ne(view.view(bits), tensor.view(bits)).any()
        for view, tensor in compress(zip(views, tensors, strict=True), comparable)
        for bits in (_BITS[view.itemsize],)
    ]
    found = iter(torch.stack(differ).tolist() if differ else ())
    return [is_comparable and not next(found) for is_comparable in comparable]


def tensor_of(memory: memoryview) -> Tensor:
    """Return a uint8 tensor that shares `memory`."""
    # frombuffer refuses empty memory; the device is explicit because the script may have changed
    # the default
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor, without its history: a DTensor is spread."""
    to_local = getattr(tensor, "to_local", None)  # without an import of DTensor, which takes long
    local: Tensor = tensor if to_local is None else to_local()
    return local.detach()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
