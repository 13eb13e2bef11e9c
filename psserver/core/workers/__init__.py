"""Which workers take part: membership and leases, step times, and health."""

__all__ = ["health", "members", "membership", "replacement", "smallest", "step_timer"]
