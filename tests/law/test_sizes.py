"""Files and functions have a maximal length."""

from statistics import quantiles

from tests.support.sources import packages, parse, suite

FILE = 400
FUNCTION = 60
# longer since lines have at most 100 columns; each is to be split, none may be added
LONGER = {
    "tests/sim/failover_world.py",
    "tests/sim/world.py",
}
P90 = 30


def test_no_file_is_too_long() -> None:
    """Split a longer file by topic."""
    found = [
        f"{source.path}: {lines} lines"
        for source in (*packages(), *suite())
        if (lines := source.text.count("\n")) > FILE and str(source.path) not in LONGER
    ]

    assert not found, "\n".join(found)


def test_files_that_became_short_leave_the_list() -> None:
    """The list may only get shorter."""
    lines = {str(source.path): source.text.count("\n") for source in (*packages(), *suite())}

    assert not [path for path in LONGER if lines.get(path, 0) <= FILE]


def test_no_function_is_too_long() -> None:
    """Lines from `def` to the last one, without the docstring."""
    found = [
        f"{source.path}: {name} has {lines} lines"
        for source in (*packages(), *suite())
        for name, lines in source.functions()
        if lines > FUNCTION
    ]

    assert not found, "\n".join(found)


def test_most_functions_are_short() -> None:
    """Nine in ten of the shipped code."""
    lines = [count for source in packages() for _, count in source.functions()]

    assert quantiles(lines, n=10)[-1] <= P90


def test_lines_of_a_function_are_counted() -> None:
    """Decorators do not count, nested functions count in both."""
    source = parse("@decorated\n@twice\ndef f():\n    def g():\n        pass\n    return g\n")

    assert list(source.functions()) == [("f", 4), ("g", 2)]
