"""Environment variables: parsing of switches, and removal of settings for child processes."""

import os
from collections.abc import Mapping

from pscommon.core.errors import InvalidRequestError
from pscommon.settings import options

ON = ("1", "on", "yes", "true")
OFF = ("", "0", "off", "no", "false")


def is_on(name: str) -> bool:
    """Return whether an environment variable is switched on.

    Raises:
        InvalidRequestError: The value is neither on nor off.
    """
    text = os.environ.get(name, "")
    word = text.strip().lower()
    if word not in ON + OFF:
        raise InvalidRequestError(f"{name}={text} is not valid. Try: {', '.join((*ON, *OFF[1:]))}")
    return word in ON


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that set options of the commands.

    For child processes that get all their settings as flags.
    """
    known = {
        variable
        for table in options.TABLES.values()
        for option in table
        for variable in option.variables
    }
    return {key: value for key, value in environ.items() if key not in known | {"PS_CONFIG"}}
