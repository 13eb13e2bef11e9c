"""Settings that have a test which fails if the setting has no effect."""

import ast
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.support.sources import dotted, suite

Test = TypeVar("Test", bound=Callable[..., None])


def server_setting(*keys: str) -> Callable[[Test], Test]:
    """Mark a test of these settings of ps-server."""
    return lambda test: test


def worker_setting(*keys: str) -> Callable[[Test], Test]:
    """Mark a test of these settings of ps-worker."""
    return lambda test: test


def run_setting(*keys: str) -> Callable[[Test], Test]:
    """Mark a test of these settings of ps-run."""
    return lambda test: test


def settings_with_test(table: str) -> set[str]:
    """Return the settings of `ps-<table>` that marks in the test suite name."""
    mark = f"{table}_setting"
    return {key for source in suite() if mark in source.text for key in _marked(source.tree, mark)}


def _marked(tree: ast.Module, mark: str) -> Iterator[str]:
    """Yield the keys of a mark: literals, or `*TABLE` of an annotated dictionary of the module."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and dotted(call.func) == mark:
            for key in call.args:
                if isinstance(key, ast.Starred):
                    yield from _keys(tree, dotted(key.value))
                else:
                    yield ast.literal_eval(key)


def _keys(tree: ast.Module, name: str) -> Iterator[str]:
    for node in tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and dotted(node.target) == name
            and isinstance(node.value, ast.Dict)
        ):
            yield from (ast.literal_eval(key) for key in node.value.keys if key is not None)
