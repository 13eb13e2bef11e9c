"""Imports of much code at once, as at the start of a command."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pscommon.core.errors import InvalidRequestError

OURS = frozenset({"pscommon", "psproto", "psserver", "psworker"})


@contextmanager
def quick_imports() -> Iterator[None]:
    """What is imported inside stays for good, so the collector need not look for garbage in it,
    now or later.

    It would go through all that is there again and again while torch is loaded: a tenth of the
    time that this takes. For the main program of a process of our own; a library must leave the
    collector alone. InvalidRequestError where a package that we need is not there, or cannot be
    loaded.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OURS:
            raise
        raise InvalidRequestError(
            f"{package} cannot be imported: {error}; install paramserver again, with what it "
            f"needs (`ps-ctl doctor`)"
        ) from error
    finally:
        gc.freeze()
        if on:
            gc.enable()
