"""Switches in the environment that commands and scripts read alike."""

import os

from pscommon.core.errors import InvalidRequestError

ON = ("1", "on", "yes", "true")
OFF = ("", "0", "off", "no", "false")


def is_on(name: str) -> bool:
    """Whether this variable is switched on; InvalidRequestError where it says neither on nor off."""
    text = os.environ.get(name, "")
    word = text.strip().lower()
    if word not in ON + OFF:
        raise InvalidRequestError(f"{name}={text} is neither on ({', '.join(ON)}) nor off ({', '.join(OFF[1:])})")
    return word in ON
