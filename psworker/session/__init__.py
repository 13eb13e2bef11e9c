"""One script's run: its membership, open loops, statistics, reported values and phases."""

__all__ = [
    "arguments",
    "drain",
    "environment",
    "job_facts",
    "metrics",
    "reports",
    "resume_notice",
    "session",
    "step_stats",
]
