"""The worker's decisions as pure state machines and values."""

__all__ = [
    "activity",
    "batch_search",
    "clock",
    "group_place",
    "protocols",
    "push_sequence",
    "results",
    "server_search",
    "trace_events",
    "why",
]
