"""The memory that a model's tensors are views of, and how its bytes get to and from the
client's.

On the CPU both are one; on a GPU, and where the model computes on while weights come, bytes are
copied between them.
"""

import ctypes
from collections.abc import Sequence
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from pscommon.core.model_spec import TensorSpec
from pscommon.core.partition import ByteRange

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number: what its bits are compared as."""

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class CopyEvent(Protocol):
    """When a copy is done: torch.cuda.Event, as far as it is needed here."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class _CopyDone:
    """There is nothing to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It is done."""


class FlatBuffer:
    """Memory that the client works on (`memory`, `host`) and that the model's tensors are views
    of (`near`).
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.host = self.near = tensor_of(memory)

    def view(self, extent: ByteRange, tensor: TensorSpec) -> Tensor:
        """The tensor's bytes beside the model, typed and shaped.

        As a storage of its own: torch.save writes whole storages, and refuses one that has
        tensors of several dtypes.
        """
        storage = self.near.untyped_storage()[extent.start : extent.stop]
        flat = torch.empty(0, dtype=_dtype(tensor.dtype), device=self.near.device).set_(storage)
        return flat.view(tensor.shape)

    def to_host(self, spans: Sequence[ByteRange]) -> CopyEvent:
        """Starts to copy these bytes from beside the model, as they are after what the model
        computes now.
        """
        return _CopyDone()

    def from_host(self, spans: Sequence[ByteRange]) -> None:
        """These bytes to the model: what it computes next sees them. Not twice the same ones
        without `rest` between.
        """

    def join(self) -> None:
        """What the model computes next sees all that `from_host` was given, also where it
        computes elsewhere now.
        """

    def rest(self) -> None:
        """Waits until what `from_host` was given last has been taken."""

    def same(self, views: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
        """Whether each of these views of the tape holds the bytes of its tensor."""
        return list(map(_same, views, tensors))


class DoubleBuffer(FlatBuffer):
    """The model's bytes lie apart, so that the client may receive new ones while the model
    computes on the old.
    """

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self.near = torch.zeros_like(self.host)

    def to_host(self, spans: Sequence[ByteRange]) -> CopyEvent:
        for start, stop in spans:
            self.host[start:stop].copy_(self.near[start:stop])
        return _CopyDone()

    def from_host(self, spans: Sequence[ByteRange]) -> None:
        for start, stop in spans:
            self.near[start:stop].copy_(self.host[start:stop])


class HostCopy:
    """A copy from a GPU that ends in memory which a GPU does not reach: the last part of the way
    is made when the first is done, by whoever asks.
    """

    def __init__(
        self, done: CopyEvent, spans: Sequence[ByteRange], source: Tensor, target: Tensor
    ) -> None:
        self._done = done
        self._spans = spans
        self._source, self._target = source, target

    def query(self) -> bool:
        if not self._done.query():
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._done.synchronize()
        for start, stop in self._spans:
            self._target[start:stop].copy_(self._source[start:stop])
        self._spans = ()


class CudaBuffer(FlatBuffer):
    """The model's bytes lie on a GPU. A stream of its own copies between them and pinned memory,
    a twin of the host's: what the client shares with servers may be mapped anew at any time,
    which a GPU must not see.

    The stream first waits, on the GPU, for what the model's stream has been given so far. So the
    host only waits where it needs the bytes, and the model computes on meanwhile.
    """

    def __init__(self, memory: memoryview, device: torch.device, stop: int | None = None) -> None:
        """stop: the GPU has no bytes from here on; None: it has all of them."""
        super().__init__(memory)
        nbytes = memory.nbytes if stop is None else stop
        self.near = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._pinned = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._taken: CopyEvent = _CopyDone()

    def to_host(self, spans: Sequence[ByteRange]) -> CopyEvent:
        return HostCopy(self._copy(self._pinned, self.near, spans), spans, self._pinned, self.host)

    def from_host(self, spans: Sequence[ByteRange]) -> None:
        for start, stop in spans:
            self._pinned[start:stop].copy_(self.host[start:stop])
        self._taken = self._copy(self.near, self._pinned, spans)
        torch.cuda.current_stream(self.near.device).wait_stream(self._stream)

    def join(self) -> None:
        # from_host only lets the stream wait that is current there, and a script may have several;
        # one that is captured into a graph may ask for no event of before
        if not torch.cuda.is_current_stream_capturing() and not self._taken.query():
            torch.cuda.current_stream(self.near.device).wait_event(self._taken)  # type: ignore[arg-type]

    def rest(self) -> None:
        self._taken.synchronize()

    def same(self, views: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
        return same_on_device(views, tensors)

    def _copy(self, into: Tensor, out_of: Tensor, spans: Sequence[ByteRange]) -> CopyEvent:
        self._stream.wait_stream(torch.cuda.current_stream(self.near.device))
        with torch.cuda.stream(self._stream):
            for start, stop in spans:
                into[start:stop].copy_(out_of[start:stop], non_blocking=True)
        done: CopyEvent = self._stream.record_event()
        return done


def _alike(view: Tensor, tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype is view.dtype


def _same(view: Tensor, tensor: Tensor) -> bool:
    """At the speed of memory, and of the bits: torch.equal is slower, and takes 0. and -0. for
    one.
    """
    if not _alike(view, tensor):
        return False
    dense = tensor.contiguous()
    return not _libc.memcmp(view.data_ptr(), dense.data_ptr(), view.nbytes)


def same_on_device(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
    """As Tape.same. The host waits for the device once, for all of them."""
    alike = list(map(_alike, views, tensors))
    differ = [
        torch.ne(view.view(bits), tensor.view(bits)).any()
        for view, tensor in compress(zip(views, tensors, strict=True), alike)
        for bits in (_BITS[view.itemsize],)
    ]
    found = iter(torch.stack(differ).tolist() if differ else ())
    return [like and not next(found) for like in alike]


def tensor_of(memory: memoryview) -> Tensor:
    """The bytes themselves, not a copy of them."""
    # frombuffer refuses empty memory; the device is said because the script may have set another
    # default
    return (
        torch.frombuffer(memory, dtype=torch.uint8)
        if memory.nbytes
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
