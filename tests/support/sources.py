"""The repository's Python files, parsed but never imported."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("psserver", "psworker", "common/pscommon")


@dataclass(frozen=True)
class Source:
    path: Path  # relative to the repository
    module: str  # dotted name as it is imported
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The nodes of the tree, in the order of ast.walk."""
        return tuple(ast.walk(self.tree))

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield each imported module, also inside functions, as (absolute dotted name, line).

        `from a import b` yields a.b and a, because b may be a module.
        """
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                yield base, node.lineno
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)

    def calls(self) -> Iterator[tuple[str, int]]:
        """Yield each call of a plain or dotted name as (name, line)."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and (name := dotted(node.func)):
                yield name, node.lineno

    def called(self) -> set[str]:
        """Return called dotted names with imports resolved: sleep(1) is time.sleep if imported from
        there.
        """
        bound = dict(self._bindings())
        return {
            ".".join([bound.get(head, head), *rest])
            for head, *rest in (n.split(".") for n, _ in self.calls())
        }

    def functions(self) -> Iterator[tuple[str, int]]:
        """Yield each function as (name, lines without docstring), including nested ones."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield node.name, lines - docstring_lines(node)

    def _bindings(self) -> Iterator[tuple[str, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                yield from (
                    (alias.asname or alias.name, f"{base}.{alias.name}") for alias in node.names
                )

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".")[: None if self.path.name == "__init__.py" else -1]
        parts = package[: len(package) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines the docstring takes; 0 without one."""
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def dotted(node: ast.expr) -> str:
    """Return a.b.c for such an expression, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


@cache
def packages() -> tuple[Source, ...]:
    """Return all shipped sources without generated code."""
    return tuple(source for folder in PACKAGES for source in below(folder))


def suite() -> tuple[Source, ...]:
    """Return the sources of the test suite."""
    return below("tests")


def parse(text: str, path: str = "psserver/example.py") -> Source:
    """Return a source from a text."""
    parts = Path(path).with_suffix("").parts
    names = [part for part in parts if part not in ("common", "__init__")]
    return Source(Path(path), ".".join(names), text, ast.parse(text))


@cache
def below(folder: str) -> tuple[Source, ...]:
    """Return the sources in a folder, also in the folders below.

    Garbage collection is off meanwhile: it would visit all nodes again and again.
    """
    gc.disable()
    try:
        return tuple(
            parse(path.read_text(), str(path.relative_to(ROOT)))
            for path in sorted((ROOT / folder).rglob("*.py"))
        )
    finally:
        gc.freeze()
        gc.enable()
