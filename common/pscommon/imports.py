"""Imports of much code at once, as at the start of a command."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """What is imported inside stays for good, so the collector need not look for garbage in it, now or later.

    It would go through all that is there again and again while torch is loaded: a tenth of the time that this takes.
    For the main program of a process of our own; a library must leave the collector alone.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if on:
            gc.enable()
