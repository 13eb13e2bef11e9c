"""Form of the texts that the catalogue tests pin."""

MAX_CHARACTERS = 200


def check_form(text: str, details: int = 0) -> None:
    """Assert that a text has at most one remedy, no full stop at its end, and is short.

    details: characters of the text that name values, paths or several remedies.
    """
    assert text.count(". Try: ") <= 1
    assert len(text) <= MAX_CHARACTERS + details
    assert not text.endswith(".")
