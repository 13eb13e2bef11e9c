"""A constant with a number carries its unit in its name.

The law covers upper-case module constants whose value is a number: a literal, or an expression of
literals. The last word of the name is a unit, or what MAX_ or MIN_ counts, in the plural; or the
name stands in DIMENSIONLESS.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.support.sources import Source, below, packages

UNITS = frozenset(
    {
        *("SECONDS", "MILLISECONDS", "MS", "MINUTES", "HOURS", "BYTES", "BITS", "CHARACTERS"),
        *("LINES", "COLUMNS", "VERSIONS", "COUNT", "SIZE", "RATIO", "FACTOR", "PORT", "CODE"),
    }
)
DIMENSIONLESS = frozenset(
    {
        # numbers that identify something
        *(
            "FETCH",
            "COMPUTE",
            "ORDER",
            "FORMAT",
            "WIRE_FORMAT",
            "NUMBERED",
            "NO_LOG",
            "NO_WEIGHTS",
            "SAFE_START_NUMBER",
        ),
        *(
            "HEADER_TAG",
            "DATA_TAG",
            "OFFSET_TAG",
            "LAST_SNAPSHOT_ATTEMPTS",
            "MAX_CONCURRENT_STARTS",
        ),
        *("MAX_RANK", "MAX_ATTEMPT", "MAX_BATCH_NUMBER", "MAX_VERSION", "WRITER_NICENESS"),
        # pure numbers
        *("LEARNING_RATE", "NORM_EPSILON", "RATE_ROUNDING", "MIN_RATE_ROUNDING"),
        # names of C headers
        *("M_TRIM_THRESHOLD", "M_TOP_PAD", "M_MMAP_THRESHOLD", "PR_SET_PDEATHSIG"),
        *("MREMAP_MAYMOVE", "MREMAP_FIXED", "MAP_FIXED", "CLONE_NEWUSER", "CLONE_NEWNET"),
        *("SIOCGIFFLAGS", "SIOCSIFFLAGS", "IFF_UP"),
    }
)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow, ast.LShift)


def is_number(value: ast.expr) -> bool:
    """Return whether an expression has only numbers and operators."""
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, OPERATORS) and is_number(value.left) and is_number(value.right)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each upper-case module constant that is a number."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = [*zip(target.elts, node.value.elts, strict=False)]
            for name, value in pairs:
                if isinstance(name, ast.Name) and name.id.isupper() and value and is_number(value):
                    yield node.lineno, name.id.strip("_")


def has_unit(name: str) -> bool:
    first, *_, last = name.split("_") if "_" in name else ("", name)
    is_counted = first in ("MAX", "MIN") and last.endswith("S")
    return last in UNITS or "_PER_" in name or is_counted or name in DIMENSIONLESS


def sources() -> Iterator[Source]:
    yield from (*packages(), *below("benchmarks"))


def test_constants_carry_their_unit() -> None:
    found = [
        f"{source.path}:{line}: {name}"
        for source in sources()
        for line, name in constants(source.tree)
        if not has_unit(name)
    ]

    assert not found, "\n".join(found)


def test_the_list_has_no_unused_names() -> None:
    names = {name for source in sources() for _, name in constants(source.tree)}

    assert names >= DIMENSIONLESS


@pytest.mark.parametrize(
    "text",
    ["PAUSE = 2.0", "SHORT, LONG_SECONDS = 1 << 3, 2", "BOUND: float = -60 * 60", "_LOOK = 0.2"],
)
def test_the_law_finds(text: str) -> None:
    assert [name for _, name in constants(ast.parse(text)) if not has_unit(name)]


@pytest.mark.parametrize(
    "text",
    ["PAUSE_SECONDS = 2.0", "MAX_SHARDS = 4", "NAMES = 'a', 'b'", "pause = 1", "IS_ON = True"],
)
def test_the_law_allows(text: str) -> None:
    assert not [name for _, name in constants(ast.parse(text)) if not has_unit(name)]
