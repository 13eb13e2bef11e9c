"""It is the tail that makes a codebase hard to read: so it is bounded."""

from statistics import quantiles

from tests.law.sources import packages, parse, suite

FILE = 400
FUNCTION = 60
P90 = 30


def test_no_file_is_too_long() -> None:
    """Split it by nouns."""
    found = [
        f"{source.path}: {lines} lines"
        for source in (*packages(), *suite())
        if (lines := source.text.count("\n")) > FILE
    ]

    assert not found, "\n".join(found)


def test_no_function_is_too_long() -> None:
    """Counted from `def` to the last line, docstring included."""
    found = [
        f"{source.path}: {name} has {lines} lines"
        for source in (*packages(), *suite())
        for name, lines in source.functions()
        if lines > FUNCTION
    ]

    assert not found, "\n".join(found)


def test_most_functions_are_short() -> None:
    """Nine in ten of what we ship."""
    lines = [count for source in packages() for _, count in source.functions()]

    assert quantiles(lines, n=10)[-1] <= P90


def test_counting() -> None:
    """Decorators do not count, nested functions count in both."""
    source = parse("@decorated\n@twice\ndef f():\n    def g():\n        pass\n    return g\n")

    assert list(source.functions()) == [("f", 4), ("g", 2)]
