"""File format of a log segment, and its reader.

    file    = magic (8 bytes) · nonce (8) · crc32 of both (4) · record ... · end mark (8)
    record  = head · header · payload
    head    = nonce (8) · kind (4) · header bytes (4) · payload bytes (8) ·
              crc32 of header and payload (4) · crc32 of the head up to here (4)

All numbers are little-endian. Each segment has a new random nonce, and each head begins with it.
Files are reused, so old bytes that once were valid records follow the end of a segment. They have
another nonce, so the reader never takes them for records of this segment. The end mark is the
bitwise complement of the nonce; the next record overwrites it. If neither a complete record nor
the end mark follows, the last append was torn, or bytes were damaged.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAGIC = b"pslog\0\0\1"  # the last byte is the version of this format
NONCE_BYTES = 8
FILE_HEAD = struct.Struct("<8s8sI")
HEAD = struct.Struct("<8sIIQI")
CHECK = struct.Struct("<I")
HEAD_BYTES = HEAD.size + CHECK.size
SCAN_BYTES = 1 << 20

Buffer = bytes | bytearray | memoryview


class Record(NamedTuple):
    """One record as it was appended.

    `payload` is read-only, format "B", in a reused buffer: it is valid until the next record is
    read. Its start is aligned for numbers of any type.

    kind: type of the record.
    header: encoded metadata.
    payload: data.
    """

    kind: int
    header: bytes
    payload: memoryview


class Head(NamedTuple):
    """Head of a record.

    kind: type of the record.
    header_bytes: length of the header.
    payload_bytes: length of the payload.
    checksum: crc32 of header and payload.
    """

    kind: int
    header_bytes: int
    payload_bytes: int
    checksum: int

    @property
    def nbytes(self) -> int:
        """Length of the whole record, in bytes."""
        return HEAD_BYTES + self.header_bytes + self.payload_bytes


class LogDamagedError(Exception):
    """A segment has damage that no crash explains; the message names file, offset and damage."""

    def __init__(self, path: Path, offset: int, fault: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {fault}")
        self.path = path
        self.offset = offset


def pack_file_head(nonce: bytes) -> bytes:
    """Return the first bytes of a segment."""
    return FILE_HEAD.pack(MAGIC, nonce, zlib.crc32(MAGIC + nonce))


def format_of_segment(raw: bytes) -> int | None:
    """Return the format number in the first bytes of a segment; None if they are not a log's."""
    name = MAGIC[:-1]
    return raw[len(name)] if raw.startswith(name) and len(raw) > len(name) else None


def unpack_file_head(raw: bytes) -> bytes:
    """Return the segment's nonce.

    Raises:
        ValueError: The bytes are not a valid file head; the message is the reason.
    """
    if len(raw) < FILE_HEAD.size:
        raise ValueError(f"only {len(raw)} bytes of the file's head")
    magic, nonce, check = FILE_HEAD.unpack(raw)
    if magic != MAGIC or check != zlib.crc32(MAGIC + nonce):
        raise ValueError("the file's head is none of this format")
    return bytes(nonce)


def pack_head(nonce: bytes, head: Head) -> bytes:
    """Return the HEAD_BYTES bytes of a head.

    Raises:
        struct.error: A number does not fit.
    """
    raw = HEAD.pack(nonce, *head)
    return raw + CHECK.pack(zlib.crc32(raw))


def unpack_head(nonce: bytes, raw: bytes) -> Head | None:
    """Return a head of this segment; None if these bytes are not one."""
    if len(raw) < HEAD_BYTES or not raw.startswith(nonce):
        return None
    if CHECK.unpack_from(raw, HEAD.size)[0] != zlib.crc32(raw[: HEAD.size]):
        return None
    _, *numbers = HEAD.unpack_from(raw)
    return Head(*numbers)


def end_mark(nonce: bytes) -> bytes:
    """Return the bytes behind the last record.

    Zeros would not do: a file that grew before a power failure is full of them.
    """
    return bytes(byte ^ 0xFF for byte in nonce)


def checksum(header: Buffer, payload: Sequence[Buffer] = ()) -> int:
    """Return the crc32 of header and payload, concatenated."""
    result = zlib.crc32(header)
    for part in payload:
        result = zlib.crc32(part, result)
    return result


class RecordReader(Iterator[Record]):
    """The complete records of one segment, in order.

    The first `next` opens the file, the last one closes it. Lengths in a head are compared with the
    file's size before memory is allocated. The file head must be valid, because a segment gets its
    name only when its head is on disk.

    torn: after the last record: whether the segment ends with a torn append.
    end: where the complete records end, in bytes.

    Raises:
        LogDamagedError: After the records before it: a valid record follows a bad one. After a
            power failure unsynced appends may look alike, if the disk has kept the later one. Also:
            the file head is bad.
        OSError: The file cannot be read; the error names it.
    """

    def __init__(self, path: Path) -> None:
        self.torn = False
        self.end = 0
        self._path = path
        self._descriptor = -1
        self._size = 0
        self._nonce = b""
        self._buffer = bytearray()
        self._records = self._walk()

    def __next__(self) -> Record:
        return next(self._records)

    def _walk(self) -> Iterator[Record]:
        with self._path.open("rb", buffering=0) as file:
            self._descriptor = file.fileno()
            self._size = os.fstat(self._descriptor).st_size
            self._read_file_head()
            while head := self._head(self.end):
                if (record := self._body(self.end, head)) is None:
                    break
                self.end += head.nbytes
                yield record
            self._check_end()

    def _read_file_head(self) -> None:
        try:
            self._nonce = unpack_file_head(self._read(0, FILE_HEAD.size))
        except ValueError as error:
            raise LogDamagedError(self._path, 0, str(error)) from error
        self.end = FILE_HEAD.size

    def _head(self, offset: int) -> Head | None:
        """Return the head at an offset; None if no record that fits into the file starts there."""
        head = unpack_head(self._nonce, self._read(offset, HEAD_BYTES))
        return head if head and offset + head.nbytes <= self._size else None

    def _body(self, offset: int, head: Head) -> Record | None:
        """Return the record; None if its bytes differ from those that were appended."""
        if len(self._buffer) < head.payload_bytes:
            self._buffer = bytearray(head.payload_bytes)
        header = self._read(offset + HEAD_BYTES, head.header_bytes)
        payload = memoryview(self._buffer)[: head.payload_bytes]
        is_complete = self._fill(offset + HEAD_BYTES + head.header_bytes, payload)
        if not is_complete or checksum(header, [payload]) != head.checksum:
            return None
        return Record(head.kind, header, payload.toreadonly())

    def _check_end(self) -> None:
        self.torn = self._read(self.end, NONCE_BYTES) != end_mark(self._nonce)
        if not self.torn:
            return
        for offset in self._nonces(self.end + 1):
            if (head := self._head(offset)) and self._body(offset, head):
                raise LogDamagedError(
                    self._path, self.end, f"a valid record follows at byte {offset}"
                )

    def _nonces(self, offset: int) -> Iterator[int]:
        """Yield offsets, not before `offset`, at which this segment's nonce is found.

        A record may start at each of them.
        """
        while len(chunk := self._read(offset, SCAN_BYTES)) >= NONCE_BYTES:
            found = chunk.find(self._nonce)
            if found >= 0:
                yield offset + found
            # without a match, the last bytes may still contain its start
            offset += found + 1 if found >= 0 else len(chunk) - NONCE_BYTES + 1

    def _read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes, or fewer at the end of the file."""
        raw = bytearray(max(0, min(nbytes, self._size - offset)))
        return bytes(raw) if self._fill(offset, memoryview(raw)) else b""

    def _fill(self, offset: int, view: memoryview) -> bool:
        """Fill the view; return False if another process has truncated the file."""
        while view:
            try:
                done = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            if not done:
                return False
            view, offset = view[done:], offset + done
        return True
