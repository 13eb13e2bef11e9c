"""How a log of records lies in a file, and how it is read again after a crash.

    file    = magic (8 bytes) · nonce (8) · crc32 of both (4) · record ... · end mark (8)
    record  = head · header · payload
    head    = nonce (8) · kind (4) · header bytes (4) · payload bytes (8) · crc32 of header and payload (4) ·
              crc32 of the head up to here (4)

All numbers are little-endian. The nonce is random and new for each segment, and each head begins
with it. Files are used again, so behind the end lie old bytes that once were valid records: they
have another nonce, so none of them is ever taken for a record of this segment. The end mark is
the nonce with all bits turned over; the next record is written over it. Where neither a whole
record nor the mark is, the last append was torn, or bytes were damaged.
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

    `payload` is read-only, format "B", and lies in memory that is used again: it is valid until
    the next record is read. Its start is aligned for numbers of any type.
    """

    kind: int
    header: bytes
    payload: memoryview


class Head(NamedTuple):
    """What a record says about itself."""

    kind: int
    header_bytes: int
    payload_bytes: int
    checksum: int  # of header and payload

    @property
    def nbytes(self) -> int:
        """Of the whole record."""
        return HEAD_BYTES + self.header_bytes + self.payload_bytes


class LogDamagedError(Exception):
    """A segment holds bytes that no crash explains; the message names the file, the offset and
    what is wrong there.
    """

    def __init__(self, path: Path, offset: int, fault: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {fault}")
        self.path = path
        self.offset = offset


def pack_file_head(nonce: bytes) -> bytes:
    """The first bytes of a segment."""
    return FILE_HEAD.pack(MAGIC, nonce, zlib.crc32(MAGIC + nonce))


def format_of_segment(raw: bytes) -> int | None:
    """Return the format number in the first bytes of a segment; None where they are not those of a log."""
    name = MAGIC[:-1]
    return raw[len(name)] if raw.startswith(name) and len(raw) > len(name) else None


def unpack_file_head(raw: bytes) -> bytes:
    """The segment's nonce. Raises ValueError, which says what is wrong."""
    if len(raw) < FILE_HEAD.size:
        raise ValueError(f"only {len(raw)} bytes of the file's head")
    magic, nonce, check = FILE_HEAD.unpack(raw)
    if magic != MAGIC or check != zlib.crc32(MAGIC + nonce):
        raise ValueError("the file's head is none of this format")
    return bytes(nonce)


def pack_head(nonce: bytes, head: Head) -> bytes:
    """HEAD_BYTES bytes. Raises struct.error where a number does not fit."""
    raw = HEAD.pack(nonce, *head)
    return raw + CHECK.pack(zlib.crc32(raw))


def unpack_head(nonce: bytes, raw: bytes) -> Head | None:
    """None where these bytes are not a whole head of this segment."""
    if len(raw) < HEAD_BYTES or not raw.startswith(nonce):
        return None
    if CHECK.unpack_from(raw, HEAD.size)[0] != zlib.crc32(raw[: HEAD.size]):
        return None
    _, *numbers = HEAD.unpack_from(raw)
    return Head(*numbers)


def end_mark(nonce: bytes) -> bytes:
    """What lies behind the last record. Zeros would not do: a file that grew before a power cut
    is full of them.
    """
    return bytes(byte ^ 0xFF for byte in nonce)


def checksum(header: Buffer, payload: Sequence[Buffer] = ()) -> int:
    """The crc32 of header and payload, one after the other."""
    result = zlib.crc32(header)
    for part in payload:
        result = zlib.crc32(part, result)
    return result


class RecordReader(Iterator[Record]):
    """The whole records of one segment, in order. The file is opened by the first `next` and
    closed by the last one.

    After the last record `torn` says whether the segment ends in a torn append, and `end` where
    the whole records end, in bytes. Raises LogDamagedError, once the records before it have been
    given, where a valid record follows a bad one; and where the file's head is bad, because a
    segment gets its name only when that is on the disk. After a power cut that is what unsynced
    appends may look like too: the disk may have kept the later one. Raises OSError with the path
    where the file cannot be read. A record's lengths are compared with the file's size before
    any memory is taken for them.
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
        """What begins there, or None where it is no record that fits into the file."""
        head = unpack_head(self._nonce, self._read(offset, HEAD_BYTES))
        return head if head and offset + head.nbytes <= self._size else None

    def _body(self, offset: int, head: Head) -> Record | None:
        """The record, or None where its bytes are not those that were appended."""
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
        """Where this segment's nonce lies at or behind an offset: what may be the start of a
        record.
        """
        while len(chunk := self._read(offset, SCAN_BYTES)) >= NONCE_BYTES:
            found = chunk.find(self._nonce)
            if found >= 0:
                yield offset + found
            # without a hit, its start may still lie in the last bytes
            offset += found + 1 if found >= 0 else len(chunk) - NONCE_BYTES + 1

    def _read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes, or fewer at the end of the file."""
        raw = bytearray(max(0, min(nbytes, self._size - offset)))
        return bytes(raw) if self._fill(offset, memoryview(raw)) else b""

    def _fill(self, offset: int, view: memoryview) -> bool:
        """Fill the view; return False if the file is too short, truncated by another process."""
        while view:
            try:
                done = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            if not done:
                return False
            view, offset = view[done:], offset + done
        return True
