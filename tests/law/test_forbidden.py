"""Constructs that the code must not contain."""

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.support.sources import ROOT, Source, packages, parse, suite

# loading data with these modules executes code of the sender
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
CALLS = {"eval", "exec", "compile", "torch.load", "torch.save", "yaml.load", "__import__"}
ALLOWED = {"psworker.supervision.script": {"exec"}}  # executes the script of the user
NAMES = {"utils", "util", "helpers", "helper", "constants", "misc", "common"}
SLEEPS = {"time.sleep", "asyncio.sleep"}
HOME = re.compile(r"(?<![\w.$~])/(?:" + "|".join(["home", "Users", "root", "work"]) + r")/\w")
TEXT = {".py", ".pyi", ".toml", ".md", ".yml", ".yaml", ".json", ".proto", ".txt", ""}
FOLDERS = ("psserver", "psworker", "common", "proto", "deploy", "tests", "benchmarks", ".ci")


def unsafe(source: Source) -> set[str]:
    modules = {name.partition(".")[0] for name, _ in source.imports()} & MODULES
    return (modules | (source.called() & CALLS)) - ALLOWED.get(source.module, set())


def test_no_code_executes_data() -> None:
    """No pickle in any form, no eval, no exec: data from a peer or a disk is never code."""
    found = [
        f"{source.path}: {sorted(names)}" for source in packages() if (names := unsafe(source))
    ]

    assert not found, "\n".join(found)


def test_no_module_has_a_vague_name() -> None:
    """A module is named after its content."""
    found = [str(source.path) for source in packages() if set(source.module.split(".")) & NAMES]

    assert not found


def test_no_test_sleeps() -> None:
    """A test waits for an event with a deadline; a fixed sleep is too long or too short."""
    found = [str(source.path) for source in suite() if source.called() & SLEEPS]

    assert not found


def callbacks(sources: Iterable[Source]) -> set[str]:
    """Return the names of attributes that hold a function."""
    return {
        node.target.attr
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and "Callable" in ast.unparse(node.annotation)
    }


def assigned_from_outside(source: Source, names: set[str]) -> Iterator[int]:
    """Yield the lines that assign a function, or one of these attributes, to another object."""
    for node in source.nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in [part for each in node.targets for part in ast.walk(each)]:
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                is_own = isinstance(target.value, ast.Name) and target.value.id == "self"
                has_function = target.attr in names or isinstance(node.value, ast.Lambda)
                if has_function and not is_own:
                    yield node.lineno


@pytest.mark.parametrize("package", ["psserver", "psworker"])
def test_callbacks_are_passed_to_constructors(package: str) -> None:
    """A Protocol, or a function, is passed once; no default waits to be replaced from outside."""
    sources = [source for source in packages() if source.module.startswith(package)]
    names = callbacks(sources)
    found = [
        f"{source.path}:{line}"
        for source in sources
        for line in assigned_from_outside(source, names)
    ]

    assert not found, "\n".join(found)


def test_the_law_finds_assigned_callbacks() -> None:
    """Of a name that a class declares, and of a lambda under any name."""
    engine = parse("class A:\n def __init__(self):\n  self.ask: Callable[[], None] = print")
    names = callbacks([engine])
    for text in ("engine.ask = run", "self.engine.ask = run", "x.y = lambda: 1", "a.ask, b = f, 1"):
        assert list(assigned_from_outside(parse(text), names)) == [1]
    for text in ("self.ask = run", "engine.other = run"):
        assert not list(assigned_from_outside(parse(text), names))


def test_no_path_into_a_home_folder() -> None:
    """Nothing depends on the location of one developer's checkout."""
    files = [
        path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.is_file()
    ]
    files += [path for path in sorted(ROOT.iterdir()) if path.is_file()]
    texts = {
        path: path.read_text()
        for path in files
        if path.suffix in TEXT and "__pycache__" not in path.parts
    }
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts.items()
        for match in HOME.finditer(text)
    ]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "def f(x):\n    return eval(x)",
        "import torch\ntorch.load('x')",
        "from torch import load\nload('x')",
        "import yaml as y\ny.load('x')",
    ],
)
def test_the_law_finds(text: str) -> None:
    """One occurrence in each."""
    assert unsafe(parse(text))


def test_the_law_allows() -> None:
    """Methods that share only a name."""
    assert not unsafe(
        parse("import re, safetensors\nre.compile('x')\nsafetensors.load(b'')\nmodel.eval()")
    )


def test_the_law_finds_sleeping() -> None:
    """In each way to import and call it."""
    for text in (
        "import time\ntime.sleep(1)",
        "import time as t\nt.sleep(1)",
        "from time import sleep\nsleep(1)",
    ):
        assert parse(text).called() == {"time.sleep"}
