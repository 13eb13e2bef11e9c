"""How a worker numbers its pushes, so that a push which is repeated counts once.

A push that got no answer may have counted, on the servers that heard it. Calling again with the
same gradient is then the same push under the same number; the servers say whether it had
counted. Another gradient gets a new number: under the old one a server that holds the first
would mix it with the second.
"""


class PushSequence:
    """Numbers from 1. Call order: `open`, then `close` when the servers have decided or `fail`
    when that is unknown.
    """

    def __init__(self) -> None:
        self._last = 0
        self._unknown: bytes | None = None

    @property
    def in_doubt(self) -> bool:
        """Did the last push end without an answer? Then `open` wants the digest of the next one."""
        return self._unknown is not None

    def open(self, digest: bytes = b"") -> tuple[int, bool]:
        """The number of the next push, and whether it repeats one that was in doubt (same
        digest).
        """
        if self._unknown is not None and self._unknown == digest:
            return self._last, True
        self._last += 1
        self._unknown = None
        return self._last, False

    def close(self) -> None:
        """The servers have decided on the push that was opened last."""
        self._unknown = None

    def fail(self, digest: bytes) -> None:
        """Nobody knows what became of the push that was opened last, whose content has this
        digest.
        """
        self._unknown = digest
