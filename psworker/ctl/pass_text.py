"""How far the current pass is, as a line for people."""

from collections.abc import Mapping
from typing import Any

from psworker.ctl.output import duration


def pass_text(progress: Mapping[str, Any] | None) -> str:
    """Return such as "pass 2 of 5: 43 %, 12 s left"; empty where the servers do not know it (a
    stream has no length).

    progress: the key `progress` of the status.
    """
    if not progress or progress.get("percent") is None or progress.get("pass") is None:
        return ""
    passes = f" of {progress['passes']}" if progress.get("passes") else ""
    text = f"pass {progress['pass']}{passes}: {progress['percent']:.0f} %"
    left = progress.get("remaining_seconds")
    if left is None or progress["percent"] >= 100:
        return text
    return f"{text}, {duration(round(left) if left >= 10 else round(left, 1))} left"
