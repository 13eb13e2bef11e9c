"""State of one script's run: membership, open loops, statistics, reported values, phases."""

__all__ = [
    "arguments",
    "batch_trial",
    "collectives",
    "drain",
    "metrics",
    "preemption",
    "reports",
    "resume_notice",
    "session",
    "step_stats",
]
