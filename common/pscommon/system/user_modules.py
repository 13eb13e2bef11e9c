"""Modules of the user's that an operator names on the command line. They are code of this
machine, never of the wire.

They are found as Python finds modules (installed packages, PYTHONPATH), and then in the current
folder.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

from pscommon.core.errors import InvalidRequestError


def check_module(flag: str, module: str) -> None:
    """Raise InvalidRequestError where there is no such module; imports nothing but its parent
    packages.
    """
    _search_current_folder()
    try:
        found = find_spec(module)
    except ModuleNotFoundError as error:
        _refuse_missing(flag, module, error)
        raise InvalidRequestError(f"{flag} {module}: importing it failed: {error!r}") from error
    if found is None:
        raise _missing(flag, module, module)


def import_user_module(flag: str, module: str) -> None:
    """Import it.

    Args:
        flag: the flag that names it, for messages.
        module: the module's name.

    Raises:
        InvalidRequestError: it is not there, or importing it failed.
    """
    _search_current_folder()
    try:
        import_module(module)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{flag} {module}: {error}") from error
    except Exception as error:
        _refuse_missing(flag, module, error)
        raise InvalidRequestError(f"{flag} {module}: importing it failed: {error!r}") from error


def _search_current_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _refuse_missing(flag: str, module: str, error: Exception) -> None:
    """Where the module itself, or its package, is missing: not something that it imports."""
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and f"{module}.".startswith(f"{error.name}.")
    ):
        raise _missing(flag, module, error.name) from None


def _missing(flag: str, module: str, missing: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{flag} {module}: there is no module {missing}. Try: start this command in the module's "
        f"folder, or put that "
        "folder on PYTHONPATH."
    )
