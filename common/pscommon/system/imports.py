"""Fast import of large packages at the start of a command."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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
