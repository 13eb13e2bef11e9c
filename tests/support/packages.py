"""Packages and their imports, from the sources. `make house` prints the table."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from tests.support.house import ALLOWED
from tests.support.sources import Source, packages

Graph = Mapping[str, set[str]]


def is_package(source: Source) -> bool:
    return source.path.name == "__init__.py"


@cache
def modules() -> dict[str, Source]:
    """Return the modules that count: neither `__init__` nor `__main__`."""
    return {
        source.module: source
        for source in packages()
        if not is_package(source) and source.path.name != "__main__.py"
    }


@cache
def faces() -> dict[str, Source]:
    """Return the `__init__` of each package by the package's name."""
    return {source.module: source for source in packages() if is_package(source)}


def package_of(module: str) -> str:
    """Return the package of a module; a module outside of packages is its own package."""
    package = module.rpartition(".")[0]
    return module if "." not in package else package


def imports_of(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the modules that a source imports, with lines; a package if only its face is meant."""
    named = set(source.imports())
    for name, line in sorted(named):
        if name == source.module:
            continue
        below = (other for other, at in named if at == line and other.startswith(f"{name}."))
        if name in modules() or (name in faces() and not any(x in modules() for x in below)):
            yield name, line


@cache
def module_graph() -> dict[str, set[str]]:
    return {
        name: {target for target, _ in imports_of(source)} for name, source in modules().items()
    }


@cache
def package_graph() -> dict[str, set[str]]:
    """Return which packages each package imports."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, targets in module_graph().items():
        graph[package_of(name)] |= {
            target if target in faces() else package_of(target) for target in targets
        }
    return {name: targets - {name} for name, targets in graph.items()}


def cycles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = [stack.pop()]
            while component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def public_modules(package: str) -> set[str]:
    """Return what `__all__` of a package lists."""
    for node in faces()[package].tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def charter(package: str) -> str:
    """Return the first line of a package's or a loose module's docstring."""
    source = faces().get(package) or modules()[package]
    return (ast.get_docstring(source.tree) or "").partition("\n")[0]


def members(package: str) -> list[str]:
    return [name for name in modules() if name.rpartition(".")[0] == package]


def table() -> Iterable[str]:
    """Yield the packages from the lowest to the highest: size, charter, allowed imports."""
    for package, allowed in ALLOWED.items():
        size = f"{len(members(package))} modules" if package in faces() else "module"
        yield f"{package} ({size})"
        yield f"    {charter(package)}"
        yield f"    may import: {', '.join(sorted(allowed)) or 'no other package of ours'}"


if __name__ == "__main__":
    print(*table(), sep="\n")
