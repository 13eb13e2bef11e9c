"""Shared memory between a worker and the servers on one host.

A worker's memory is private at first. `share` moves it to a new memfd and returns its descriptor,
which reaches a server over a Unix socket. A server that can `attach` it sees the same bytes. The
memory has no name: the kernel frees it when the last process unmaps it or dies.

**Addresses never change.** `share` and `detach` make a new mapping elsewhere, fill it, and move it
over the old one in one system call (mremap). So arrays and tensors that are views of `memory` stay
valid, and a concurrent reader sees the same bytes before and after. A write during `share` or
`detach` may be lost and is not allowed. Memory registered with CUDA is pinned to its old pages:
register after `share`, and unregister before `detach`.

**Ownership.** A view owns the mapping: the mapping ends with its last view, never earlier. `close`
drops only the references of the object itself, so a tensor may outlive the object.

**Seals.** The size of the memory can never change, so no process can end another one by SIGBUS. A
server checks the seals and the size before it maps anything. Only a memfd can have these seals.

**What a fork writes is its own.** In a fork a private copy-on-write mapping replaces the shared
mapping; that costs no memory, whatever the number of forks. Later writes of other processes still
show in pages that the fork has not written to: a fork that reads for long, such as an evaluator,
needs a copy.

Linux only. `share` and `detach` need the memory twice while they run.
"""

import ctypes
import fcntl
import mmap
import os
import sys
import weakref
from ctypes import c_int, c_long, c_size_t, c_void_p

MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MAP_FIXED = 0x10
MAP_FAILED = c_void_p(-1).value
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The size is fixed, and no other seal can be added."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]  # the last one is off_t
_libc.munmap.argtypes = [c_void_p, c_size_t]

# length and file descriptor of each shared mapping, by address
_shared: dict[int, tuple[int, int]] = {}


class NoSharedMemoryError(Exception):
    """A region cannot be shared here; the message has the reason and a remedy."""


class NotSharedError(Exception):
    """A descriptor is not that of a region of the expected size; the message has the reason."""


class SharedRegion:
    """Zeroed memory, private to this process until `share`; it can be shared repeatedly.

    One thread at a time may call the methods.

    Attributes:
        nbytes: Size in bytes.
        is_shared: The memory is shared.
        memory: Writable view of the memory, format "B", page-aligned, at the same address until
            `close`.

    Raises:
        OSError: There is not enough memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_shared = False
        self._address = _map(nbytes)
        self._owner: object = (owner := _own(self._address, nbytes))
        self.memory = memoryview(owner).cast("B")

    def share(self) -> int:
        """Move the bytes to a new memfd, and return its descriptor.

        The descriptor is valid until the next call of `share`, `detach` or `close`. A region that
        is shared already leaves its old memory to the processes that have it.

        Raises:
            NoSharedMemoryError: The memory cannot be shared. Nothing has changed.
            ValueError: The region is closed.
        """
        if self._owner is None:
            raise ValueError("the region is closed")
        if sys.platform != "linux":
            raise NoSharedMemoryError(f"cannot share memory on {sys.platform}, only on Linux")
        try:
            descriptor = _sealed_memory(self.nbytes)
            try:
                self._move_to(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise NoSharedMemoryError(
                f"cannot share {self.nbytes / (1 << 20):.1f} MiB: {error.strerror}. Try: a larger "
                "memory limit, a system that permits memfd_create, or `--lanes stream`"
            ) from error
        _shared[self._address], self.is_shared = (self.nbytes, descriptor), True
        return descriptor

    def detach(self) -> None:
        """Make the bytes private again. Other processes keep the memory as it was. Idempotent.

        Raises:
            OSError: There is not enough memory for a copy. Nothing has changed.
        """
        if self.is_shared:
            self._move_to(None)
            self.is_shared = False

    def close(self) -> None:
        """Release the memory; `memory` is empty then. Existing views stay valid. Idempotent."""
        self.is_shared = False
        self.memory, self._owner = memoryview(bytearray()), None

    def _move_to(self, descriptor: int | None) -> None:
        """Map a memfd, or None new private memory, with the same bytes over the memory."""
        new = _map(self.nbytes, descriptor)
        ctypes.memmove(new, self._address, self.nbytes)
        _replace(self._address, new, self.nbytes)
        _forget(self._address)


def attach(descriptor: int, nbytes: int) -> memoryview:
    """Map the region of a descriptor; return a writable view of its bytes, format "B".

    The caller closes the descriptor.

    Raises:
        NotSharedError: It is no region of this size, or the region cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memory file
        seals = 0
    if seals & SEALS != SEALS:
        raise NotSharedError("it is not a memfd with the seals SHRINK, GROW and SEAL")
    size = os.fstat(descriptor).st_size
    if size != _length(nbytes):
        raise NotSharedError(f"it has {size} bytes, not {_length(nbytes)}")
    try:
        return memoryview(_own(_map(nbytes, descriptor), nbytes)).cast("B")
    except OSError as error:
        raise NotSharedError(f"it cannot be mapped: {error.strerror}") from error


def _length(nbytes: int) -> int:
    """Return the size of a mapping, which cannot be empty."""
    return max(1, nbytes)


def _sealed_memory(nbytes: int) -> int:
    """Return the descriptor of a memfd whose size is fixed. Raises OSError."""
    descriptor = os.memfd_create("paramserver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, _length(nbytes))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _map(
    nbytes: int,
    descriptor: int | None = None,
    flags: int = mmap.MAP_SHARED | mmap.MAP_POPULATE,
    fixed_address: int = 0,
) -> int:
    """Map a file, by default shared and populated, or without one new private memory.

    Returns its address. Raises OSError.
    """
    if descriptor is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(
        fixed_address or None,
        _length(nbytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags,
        -1 if descriptor is None else descriptor,
        0,
    )
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def _replace(address: int, new: int, nbytes: int) -> None:
    """Move a mapping over another one, atomically for readers.

    Raises:
        OSError: The move failed; the new mapping is released.
    """
    mremap, length = _libc.mremap, _length(nbytes)
    mremap.restype, mremap.argtypes = c_void_p, [c_void_p, c_size_t, c_size_t, c_int, c_void_p]
    if mremap(new, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED:
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _libc.munmap(new, length)
        raise error


def _own(address: int, nbytes: int) -> "ctypes.Array[ctypes.c_ubyte]":
    """Return the bytes of a mapping.

    All views of them refer to the returned object, and the mapping ends with it.
    """
    owner = (ctypes.c_ubyte * nbytes).from_address(address)
    # not at exit: other threads may read then, and the kernel unmaps in any case
    weakref.finalize(owner, _unmap, address, nbytes).atexit = False
    return owner


def _unmap(address: int, nbytes: int) -> None:
    _forget(address)
    _libc.munmap(address, _length(nbytes))


def _forget(address: int) -> None:
    """Close the descriptor of a mapping that is no longer shared."""
    if address in _shared:
        os.close(_shared.pop(address)[1])


def _make_private() -> None:
    """Replace shared mappings by private ones, in a fork."""
    while _shared:
        address, (nbytes, descriptor) = _shared.popitem()
        _map(nbytes, descriptor, mmap.MAP_PRIVATE | MAP_FIXED, address)
        os.close(descriptor)


os.register_at_fork(after_in_child=_make_private)
