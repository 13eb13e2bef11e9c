"""Which workers take part: membership and leases, step times, and health."""
