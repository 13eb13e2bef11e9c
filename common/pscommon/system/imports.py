"""Imports: of large packages, fast, and of user modules named on the command line.

User modules are never received over the network. They are searched for where Python does (installed
packages, PYTHONPATH), then in the current folder.
"""

import functools
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from pscommon.core.errors import InvalidRequestError

OURS = frozenset({"pscommon", "psproto", "psserver", "psworker"})


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, and exclude the imported objects from it for good.

    Collections take a tenth of the time that torch needs to load. Only for the main program of a
    process: a library must not change the collector.

    Raises:
        InvalidRequestError: a required package is missing or cannot be loaded.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OURS:
            raise
        raise InvalidRequestError(
            f"{package} cannot be imported: {error}. Try: reinstall paramserver with its "
            f"dependencies, and run `ps-ctl doctor`"
        ) from error
    finally:
        gc.freeze()
        if is_enabled:
            gc.enable()


@functools.cache
def installed(name: str) -> str:
    """Return the version of a distribution, cached because each look-up takes 2 ms.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    import importlib.metadata  # takes as long as all of psworker's imports

    return importlib.metadata.version(name)


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
    """Import a user module; raise InvalidRequestError if it is missing, or its import failed.

    flag: Flag that names it, for messages.
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
