"""The table of packages (house.py): allowed imports, size and public modules of a package."""

import ast
from collections import defaultdict

from tests.support.house import ALLOWED
from tests.support.packages import (
    charter,
    cycles,
    faces,
    imports_of,
    members,
    module_graph,
    modules,
    package_graph,
    package_of,
    public_modules,
)
from tests.support.sources import packages

FEWEST, MAX_MODULES = 3, 12
LOOSE = 8  # modules beside the packages
NAMESPACES = {"psserver", "psworker", "pscommon", "psserver.core"}  # packages of packages


def test_every_package_is_in_the_table() -> None:
    assert set(ALLOWED) == {package_of(name) for name in modules()}


def test_packages_import_what_the_table_allows() -> None:
    """Imports for type checking and inside functions count as well."""
    found = [
        f"{package} imports {target}"
        for package, targets in package_graph().items()
        for target in sorted(targets)
        if target not in ALLOWED[package]
    ]

    assert not found, "\n".join(found)


def test_the_table_allows_no_unused_import() -> None:
    unused = [
        f"{package}: {target}"
        for package, allowed in ALLOWED.items()
        for target in sorted(allowed - package_graph()[package])
    ]

    assert not unused, "\n".join(unused)


def test_the_table_is_in_order_of_dependency() -> None:
    """So it has no cycle."""
    seen: set[str] = set()
    for package, allowed in ALLOWED.items():
        assert allowed <= seen | set(faces()) - set(ALLOWED), package
        seen.add(package)


def test_no_modules_import_each_other_in_a_cycle() -> None:
    assert cycles(module_graph()) == []


def test_other_packages_import_only_public_modules() -> None:
    """`__all__` of a package lists them."""
    found = [
        f"{source.path}:{line}: {target} is not in __all__ of its package"
        for name, source in modules().items()
        for target, line in imports_of(source)
        if target in modules()
        and package_of(target) in faces()
        and package_of(target) != package_of(name)
        and target.rpartition(".")[2] not in public_modules(package_of(target))
    ]

    assert not found, "\n".join(found)


def test_packages_have_neither_too_few_nor_too_many_modules() -> None:
    sizes = {name: len(members(name)) for name in faces() if name not in NAMESPACES}

    assert not {name: size for name, size in sizes.items() if not FEWEST <= size <= MAX_MODULES}
    assert {name: len(members(name)) for name in NAMESPACES if len(members(name)) > LOOSE} == {}


def test_every_package_has_a_charter() -> None:
    assert [name for name in faces() if len(charter(name)) < 20] == []


def test_class_names_are_used_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for source in packages():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(source.module)

    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_constructor_gets_self() -> None:
    """A helper that refers to its owner is a cycle of objects; pass values or bound methods."""
    classes = {
        node.name
        for source in packages()
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }
    found = [
        f"{source.path}:{node.lineno}"
        for source in packages()
        for node in source.nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in classes
        and any(
            isinstance(value, ast.Name) and value.id == "self"
            for value in (*node.args, *(k.value for k in node.keywords))
        )
    ]

    assert not found, "\n".join(found)


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert cycles({"a": {"b"}, "b": set()}) == []
