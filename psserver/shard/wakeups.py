"""Wakes what waits for a change of one thing, without waking all others."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

K = TypeVar("K")


class Wakeups(Generic[K]):
    """Functions to call when the thing that a key names may have changed.

    Args:
        lock: Guards the functions. It is held while they run, so they must not wait.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._functions: dict[K, list[Callable[[], None]]] = {}

    @property
    def keys(self) -> list[K]:
        """The things that something waits for."""
        return list(self._functions)

    @contextmanager
    def calling(self, wake: Callable[[], None], key: K) -> Iterator[None]:
        """Call `wake` for this key until the block ends."""
        with self._lock:
            self._functions.setdefault(key, []).append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._functions[key].remove(wake)
                if not self._functions[key]:
                    del self._functions[key]

    def wake(self, keys: Iterable[K]) -> None:
        """Call the functions of these keys. The lock is held."""
        for key in keys:
            for function in self._functions.get(key, ()):
                function()
