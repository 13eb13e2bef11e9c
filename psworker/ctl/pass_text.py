"""Text about the progress of the current pass over the data."""

from collections.abc import Mapping
from typing import Any

from psworker.ctl.output import duration


def pass_text(progress: Mapping[str, Any] | None) -> str:
    """Format the progress: "pass 2 of 5: 43 %, 12 s left".

    Args:
        progress: value of `progress` in the status.

    Returns:
        The text; empty if the progress is unknown, as for a stream.
    """
    if not progress or progress.get("percent") is None or progress.get("pass") is None:
        return ""
    passes = f" of {progress['passes']}" if progress.get("passes") else ""
    text = f"pass {progress['pass']}{passes}: {progress['percent']:.0f} %"
    left = progress.get("remaining_seconds")
    if left is None or progress["percent"] >= 100:
        return text
    return f"{text}, {duration(round(left) if left >= 10 else round(left, 1))} left"
