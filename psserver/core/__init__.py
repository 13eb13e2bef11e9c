"""The servers' decisions as pure state machines: `step(event, now) -> effects`.

`shard` has one shard's machines, `workers` the membership, `data` the data ledger, `reports` the
reported values, `job` the coordinator's machine, and `commands` what may be asked of it.
"""
