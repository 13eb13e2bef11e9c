"""Formats that this release speaks and writes, and the refusal of newer ones (docs/formats.md)."""

from pscommon.core.errors import FormatError

WIRE_FORMAT = 1
"""Of messages between workers and servers, and of records for a standby."""


def spoken_format() -> int | None:
    """Return what a message says of its format; None: nothing, which means format 1."""
    return WIRE_FORMAT if WIRE_FORMAT > 1 else None


def check_wire_format(theirs: int, who: str, here: str) -> None:
    """Refuse a peer whose format is newer than what this process speaks.

    Args:
        theirs: The peer's format; 0 means that it did not name one, and speaks format 1.
        who: The peer, for the message.
        here: This process, for the message.

    Raises:
        FormatError: The peer speaks a newer format.
    """
    if theirs > WIRE_FORMAT:
        raise FormatError(
            f"{who} speaks message format {theirs}, and {here} speaks {WIRE_FORMAT}. "
            f"Try: install the newer release of paramserver for {here} too."
        )


def check_file_format(found: object, known: int, what: str) -> None:
    """Raise FormatError for a file of a newer format than `known`. what: the file, for the message."""
    if isinstance(found, int) and found > known:
        raise FormatError(
            f"{what} has format {found}, and this release reads formats up to {known}. "
            "Try: the release of paramserver that wrote it, or a newer one."
        )
