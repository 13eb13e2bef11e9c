"""Formats that this release sends and writes, and the refusal of others (docs/formats.md)."""

from pscommon.core.errors import FormatError

WIRE_FORMAT = 3
"""Format of messages between workers and servers, and of records for a standby."""


def spoken_format() -> int:
    """Return the format number for outgoing messages."""
    return WIRE_FORMAT


def check_wire_format(theirs: int, who: str, here: str) -> None:
    """Raise FormatError if a peer (`who`) has another format than this process (`here`).

    theirs: The peer's format; 0: the message has no format field, which means format 1.
    """
    theirs = theirs or 1
    if theirs != WIRE_FORMAT:
        older = here if theirs > WIRE_FORMAT else who
        raise FormatError(
            f"{who} uses message format {theirs}, but {here} uses format {WIRE_FORMAT}. "
            f"Try: install the newer release of paramserver for {older} too"
        )


def check_file_format(found: object, known: int, what: str) -> None:
    """Refuse a file whose format is newer than `known`.

    Args:
        found: The file's format; a value that is not an integer is accepted.
        known: The newest format that this release reads.
        what: The file, for the message.

    Raises:
        FormatError: The file has a newer format.
    """
    if isinstance(found, int) and found > known:
        raise FormatError(
            f"{what} has format {found}, but this release reads formats up to {known}. "
            "Try: the release of paramserver that wrote it, or a newer one"
        )
