"""A group: the processes of one machine (ranks) that are one worker of the job.

`torchrun --no-python ps-worker --group` or `ps-run --group-size` starts the ranks. All run the same
script and make the same calls in the same order. Rank 0 is the worker; `GroupClient` gives the
others its answers. A rank has the whole model, or boxes of it (`boxes`, `spread_adapter`).
"""

__all__ = ["client", "link", "process_group", "wrapped"]
