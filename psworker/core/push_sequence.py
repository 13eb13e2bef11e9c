"""Numbers of a worker's pushes, so that a repeated push counts once.

A push without an answer may have counted on the servers that received it. A call with the same
gradient repeats the push under its number, and the servers report whether it had counted. Another
gradient gets a new number: under the old one a server could mix it with the first gradient.
"""


class PushSequence:
    """Numbers pushes from 1.

    Call order: `open`, then `close` when the servers have decided, or `fail` when the outcome is
    unknown.
    """

    def __init__(self) -> None:
        self._last = 0
        self._unknown: bytes | None = None

    @property
    def in_doubt(self) -> bool:
        """The last push ended without an answer, so `open` needs the digest of the next push."""
        return self._unknown is not None

    def open(self, digest: bytes = b"") -> tuple[int, bool]:
        """Return the number of the next push, and whether it repeats the push in doubt."""
        if self._unknown is not None and self._unknown == digest:
            return self._last, True
        self._last += 1
        self._unknown = None
        return self._last, False

    def close(self) -> None:
        """Record that the servers have decided on the push that was opened last."""
        self._unknown = None

    def fail(self, digest: bytes) -> None:
        """Record that the outcome of the push that was opened last is unknown.

        digest: Of the content of that push.
        """
        self._unknown = digest
