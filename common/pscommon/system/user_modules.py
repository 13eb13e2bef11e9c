"""Import of user modules named on the command line; they are never received over the network.

Search order: Python's own (installed packages, PYTHONPATH), then the current folder.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

from pscommon.core.errors import InvalidRequestError


def check_module(flag: str, module: str) -> None:
    """Check that a module exists; import only its parent packages.

    Raises:
        InvalidRequestError: there is no such module.
    """
    _search_current_folder()
    try:
        found = find_spec(module)
    except ModuleNotFoundError as error:
        _refuse_missing(flag, module, error)
        raise InvalidRequestError(
            f"`{flag} {module}` failed: importing it raised {error!r}"
        ) from error
    if found is None:
        raise _missing(flag, module, module)


def import_user_module(flag: str, module: str) -> None:
    """Import a user module.

    Args:
        flag: Flag that names it, for messages.
        module: Dotted name.

    Raises:
        InvalidRequestError: It is missing, or its import failed.
    """
    _search_current_folder()
    try:
        import_module(module)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"`{flag} {module}` failed: {error}") from error
    except Exception as error:
        _refuse_missing(flag, module, error)
        raise InvalidRequestError(
            f"`{flag} {module}` failed: importing it raised {error!r}"
        ) from error


def _search_current_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _refuse_missing(flag: str, module: str, error: Exception) -> None:
    """Raise if the module or its package is missing, not one of its own imports."""
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and f"{module}.".startswith(f"{error.name}.")
    ):
        raise _missing(flag, module, error.name) from None


def _missing(flag: str, module: str, missing: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"`{flag} {module}` failed: there is no module {missing}. Try: start this command in the "
        "module's folder, or put that folder on PYTHONPATH"
    )
