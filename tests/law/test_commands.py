"""The coordinator executes typed commands; its state machine consists of small classes."""

import ast
from collections.abc import Iterator

from tests.support.sources import Source, packages, parse

MOST_METHODS = 24
DISPATCH = (
    "psserver/core/commands/",
    "psserver/core/coordinator/",
    "psserver/core/job/",
    "psserver/coordinator/",
)
TYPED = (
    "psserver/core/commands/request_checks.py",
    "psserver/core/coordinator/",
    "psserver/coordinator/executor.py",
    "psserver/coordinator/heartbeats.py",
    "psserver/coordinator/shard_connections.py",
    "psserver/coordinator/worker_handlers.py",
)
"""Files between the shell and the core: `Any` is allowed there in the values of JSON only."""
JSON = ("dict[str, Any]", "Mapping[str, Any]", "list[Any]")


def method_counts(source: Source) -> Iterator[tuple[str, int]]:
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name, sum(isinstance(each, ast.FunctionDef) for each in node.body)


def string_dispatch(source: Source) -> Iterator[int]:
    """Return the lines that call getattr, or `do` with a name."""
    for node in source.nodes:
        if isinstance(node, ast.Call):
            named = ast.unparse(node.func).rpartition(".")[2]
            text = node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            if named in ("getattr", "setattr", "methodcaller") or (named == "do" and text):
                yield node.lineno


def untyped(source: Source) -> Iterator[int]:
    """Return the lines of annotations with Any outside JSON values."""
    for node in source.nodes:
        notes = []
        if isinstance(node, ast.FunctionDef):
            notes.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            notes.append(node.annotation)
        for note in notes:
            text = ast.unparse(note) if note is not None else ""
            for allowed in JSON:
                text = text.replace(allowed, "")
            if "Any" in text:
                yield node.lineno


def test_the_coordinator_is_not_driven_by_strings() -> None:
    found = [
        f"{source.path}:{line}"
        for source in packages()
        if str(source.path).startswith(DISPATCH) and source.path.name != "status.py"
        for line in string_dispatch(source)
    ]

    assert not found, "\n".join(found)


def test_nothing_between_shell_and_core_is_untyped() -> None:
    found = [
        f"{source.path}:{line}"
        for source in packages()
        if str(source.path).startswith(TYPED)
        for line in untyped(source)
    ]

    assert not found, "\n".join(found)


def test_classes_of_the_servers_core_have_few_methods() -> None:
    """A larger class has several responsibilities: compose it of parts."""
    found = [
        f"{source.path}: {name} has {count} methods"
        for source in packages()
        if str(source.path).startswith("psserver/core/")
        for name, count in method_counts(source)
        if count > MOST_METHODS
    ]

    assert not found, "\n".join(found)


def test_untyped_code_is_found() -> None:
    source = parse('recorder.do("join")\nrecorder.do(Join())\ngetattr(a, "b")\n')
    notes = parse("def f(a: Any, b: dict[str, Any]) -> list[Any]:\n    c: Any = 1\n")

    assert list(string_dispatch(source)) == [1, 3]
    assert sorted(untyped(notes)) == [1, 2]
