"""The worker's decisions as pure state machines and values."""

__all__ = [
    "activity",
    "batch_search",
    "clock",
    "protocols",
    "push_sequence",
    "results",
    "server_search",
]
