"""Shared memory between a worker and the servers on one host.

A worker's memory is private at first. `share` gives it a file in /dev/shm and returns a
MemoryOffer for the servers. A server that can `attach` sees the same /dev/shm: it has found the
random token of the offer in the file. After all servers have attached, `hide` removes the name;
the kernel frees the memory when the last process unmaps it or dies.

**Addresses never change.** `share` and `detach` make a new mapping elsewhere, fill it, and move it
over the old one in one system call (mremap). So arrays and tensors that are views of `memory` stay
valid, and a concurrent reader sees the same bytes before and after. A write during `share` or
`detach` may be lost and is not allowed. Memory registered with CUDA is pinned to its old pages:
register after `share`, and unregister before `detach`.

**Ownership.** A view owns the mapping: the mapping ends with its last view, never earlier. `close`
drops only the references of the object itself, so a tensor may outlive the object.

**A name lives as long as its creator.** Between `share` and `hide` the creator holds a lock (flock)
on the file. `sweep` removes files that are not locked. If sweep removes a file before its creator
has locked it, the creator notices that the name is missing and makes another file. The lock belongs
to the open file, so a fork of the creator (a DataLoader worker) shares it: the end of the fork does
not release the lock. If the creator is killed before `hide`, sweep leaves the file until its forks
have ended too. A fork never removes the creator's name.

**What a fork writes is its own.** In a fork a private copy-on-write mapping replaces the shared
mapping; that costs no memory, whatever the number of forks. Later writes of other processes still
show in pages that the fork has not written to: a fork that reads for long, such as an evaluator,
needs a copy.

**Access.** The file belongs to its creator's user (mode 0600). A file that another user owns or may
use is refused. Processes of one user trust each other: a process that truncates the file would end
the others by SIGBUS.

Linux only. `detach` needs the memory twice while it runs.
"""

import ctypes
import errno
import fcntl
import hmac
import mmap
import os
import re
import secrets
import stat
import sys
import weakref
from contextlib import suppress
from ctypes import c_int, c_long, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/dev/shm")
NAME = re.compile(r"paramserver-[0-9a-f]{32}")
TOKEN_BYTES = 32
# the header holds the token; it is a page, because the memory after it must start on a page
HEADER_BYTES = mmap.PAGESIZE
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MAP_FIXED = 0x10
MAP_FAILED = c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]  # the last one is off_t
_libc.munmap.argtypes = [c_void_p, c_size_t]

# length and file descriptor of each shared mapping, by address
_shared: dict[int, tuple[int, int]] = {}


class NoSharedMemoryError(Exception):
    """A region cannot be shared here; the message has the reason and a remedy."""


class NotSharedError(Exception):
    """An offer is not valid here: another host, another user, or another file."""


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """What a server needs to attach a region.

    Attributes:
        name: Name of the file, without its folder.
        token: TOKEN_BYTES random bytes, which are in the file too.
        nbytes: Size of the region in bytes, without the header.
    """

    name: str
    token: bytes
    nbytes: int


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

    def __init__(self, nbytes: int, folder: Path = FOLDER) -> None:
        self.nbytes = nbytes
        self.is_shared = False
        self._folder = folder
        self._file: _SharedFile | None = None
        self._length = HEADER_BYTES + nbytes
        self._address = _map(self._length)
        self._owner: object = (owner := _own(self._address, nbytes))
        self.memory = memoryview(owner).cast("B")

    def share(self) -> MemoryOffer:
        """Move the bytes to a new file of the folder, and return an offer for it.

        A region that is shared already leaves its old file to the processes that have it.

        Raises:
            NoSharedMemoryError: The memory cannot be shared. Nothing has changed, and no file is
                left.
            ValueError: The region is closed.
        """
        if self._owner is None:
            raise ValueError("the region is closed")
        if sys.platform != "linux":
            raise NoSharedMemoryError(f"cannot share memory on {sys.platform}, only on Linux")
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            file = self._fill(token)
        except OSError as error:
            raise NoSharedMemoryError(_reason(self._folder, self._length, error)) from error
        self.hide()
        self._file, self.is_shared = file, True
        return MemoryOffer(file.path.name, token, self.nbytes)

    def hide(self) -> None:
        """Remove the name of the file; later attempts to attach fail. Idempotent."""
        if self._file is not None:
            self._file.remove()
            self._file = None

    def detach(self) -> None:
        """Make the bytes private again. Other processes keep the file as it was. Idempotent.

        Raises:
            OSError: There is not enough memory for a copy. Nothing has changed.
        """
        if self.is_shared:
            copy = _map(self._length)
            ctypes.memmove(copy + HEADER_BYTES, self._address + HEADER_BYTES, self.nbytes)
            _replace(self._address, copy, self._length)
            _forget(self._address)
            self.is_shared = False
        self.hide()

    def close(self) -> None:
        """Release the memory; `memory` is empty then. Existing views stay valid. Idempotent."""
        self.hide()
        self.is_shared = False
        self.memory, self._owner = memoryview(bytearray()), None

    def _fill(self, token: bytes) -> "_SharedFile":
        """Write token and contents to a new file, and map it over the memory."""
        file = _SharedFile(self._folder)
        try:
            while not file.lock():
                file.remove()
                file = _SharedFile(self._folder)
            os.posix_fallocate(file.descriptor, 0, self._length)
            _write(file.descriptor, token, 0)
            _write(file.descriptor, self.memory, HEADER_BYTES)
            descriptor = os.dup(file.descriptor)
            try:
                _replace(self._address, _map(self._length, descriptor), self._length)
            except BaseException:
                os.close(descriptor)
                raise
            _forget(self._address)
            _shared[self._address] = self._length, descriptor
        except BaseException:
            file.remove()
            raise
        return file


def attach(offer: MemoryOffer, folder: Path = FOLDER) -> memoryview:
    """Map the region of an offer; return a writable view of its bytes, format "B".

    Raises:
        NotSharedError: The offer is not valid here; the message has the reason.
    """
    if not NAME.fullmatch(offer.name):
        raise NotSharedError(f"{offer.name!r} is not a name of a shared region")
    path = folder / offer.name
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NotSharedError(
            f"{path}: {'is a symlink' if error.errno == errno.ELOOP else error.strerror}"
        ) from error
    try:
        if fault := _fault(descriptor, offer):
            raise NotSharedError(f"{path} {fault}")
        mapping = _own(_map(HEADER_BYTES + offer.nbytes, descriptor), offer.nbytes)
        return memoryview(mapping).cast("B")
    except OSError as error:
        raise NotSharedError(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def sweep(folder: Path = FOLDER) -> list[str]:
    """Remove this user's files whose creators died before `hide`; return their names."""
    try:
        names = sorted(name for name in os.listdir(folder) if NAME.fullmatch(name))
    except OSError:
        return []
    return [name for name in names if _sweep(folder / name)]


class _SharedFile:
    """A new file, to be locked against sweep. Its name ends with this object at the latest."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"paramserver-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(self.path, flags, 0o600)
        self.remove = weakref.finalize(self, _remove, self.path, self.descriptor, os.getpid())

    def lock(self) -> bool:
        """Lock the file; return False if sweep has removed it."""
        os.fchmod(self.descriptor, 0o600)  # a umask may have removed the owner's rights
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self.descriptor).st_nlink > 0


def _remove(path: Path, descriptor: int, creator: int) -> None:
    if os.getpid() == creator:  # a fork has a copy of the object, but must not remove the file
        with suppress(OSError):  # already removed or replaced by another process
            path.unlink()
    os.close(descriptor)


def _sweep(path: Path) -> bool:
    """Remove the file if it has no owner; return whether it was removed."""
    try:
        # O_NONBLOCK: if this is a pipe, open would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _fault(descriptor: int, offer: MemoryOffer) -> str:
    """Return why this is not the offered file; empty: it is."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to the server's user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"is accessible to others: mode {stat.S_IMODE(found.st_mode):04o}"
    if found.st_size != HEADER_BYTES + max(offer.nbytes, 0):
        return f"has {found.st_size} bytes, not the header and {offer.nbytes} more"
    if not hmac.compare_digest(os.pread(descriptor, TOKEN_BYTES, 0), offer.token):
        return "holds another token"
    return ""


def _reason(folder: Path, needed: int, error: OSError) -> str:
    if error.errno != errno.ENOSPC:
        return f"cannot share memory in {folder}: {error.strerror}"
    free = "an unknown amount"
    with suppress(OSError):
        space = os.statvfs(folder)
        free = f"{space.f_bavail * space.f_frsize / (1 << 20):.1f} MiB"
    return (
        f"{folder} is too small: {needed / (1 << 20):.1f} MiB are needed and {free} are free. Try: "
        "make it larger (shm_size in compose, `--shm-size` in docker run), or `--lanes grpc`"
    )


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    remaining = memoryview(data)
    while remaining:  # one system call writes at most 2 GiB
        written = os.pwrite(descriptor, remaining, offset)
        remaining, offset = remaining[written:], offset + written


def _map(
    length: int,
    descriptor: int = -1,
    flags: int = mmap.MAP_SHARED | mmap.MAP_POPULATE,
    fixed_address: int = 0,
) -> int:
    """Map a file, by default shared and populated, or without one new private memory.

    Returns its address. Raises OSError.
    """
    if descriptor < 0:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(
        fixed_address or None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0
    )
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def _replace(address: int, new: int, length: int) -> None:
    """Move a mapping over another one, atomically for readers.

    Raises:
        OSError: The move failed; the new mapping is released.
    """
    mremap = _libc.mremap
    mremap.restype, mremap.argtypes = c_void_p, [c_void_p, c_size_t, c_size_t, c_int, c_void_p]
    if mremap(new, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED:
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _libc.munmap(new, length)
        raise error


def _own(address: int, nbytes: int) -> "ctypes.Array[ctypes.c_ubyte]":
    """Return the bytes after a mapping's header.

    All views of them refer to the returned object, and the mapping ends with it.
    """
    owner = (ctypes.c_ubyte * nbytes).from_address(address + HEADER_BYTES)
    # not at exit: other threads may read then, and the kernel unmaps in any case
    weakref.finalize(owner, _unmap, address, HEADER_BYTES + nbytes).atexit = False
    return owner


def _unmap(address: int, length: int) -> None:
    _forget(address)
    _libc.munmap(address, length)


def _forget(address: int) -> None:
    """Close the file of a mapping that is no longer shared."""
    if address in _shared:
        os.close(_shared.pop(address)[1])


def _make_private() -> None:
    """Replace shared mappings by private ones, in a fork."""
    while _shared:
        address, (length, descriptor) = _shared.popitem()
        _map(length, descriptor, mmap.MAP_PRIVATE | MAP_FIXED, address)
        os.close(descriptor)


os.register_at_fork(after_in_child=_make_private)
