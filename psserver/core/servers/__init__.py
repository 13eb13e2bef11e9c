"""The servers of a job as the coordinator knows them: which process serves each shard, how it
catches up with the log, and what follows from its reports.
"""

__all__ = ["catch_up", "server_entry", "shard_directory", "shard_protocol"]
