"""The coordinator's machine and its parts: update rounds, reports, registration, data
requests, resharding; and how shards and workers are admitted.
"""

__all__ = [
    "admission",
    "collective_calls",
    "data_requests",
    "machine",
    "registration",
]
