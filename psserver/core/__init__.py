"""The servers' decisions as pure state machines: `step(event, now) -> effects`.

`shard` has one shard's machines, `workers` the membership, `data` the data ledger, `reports` the
reported values, `job` the state of a job, `coordinator` the machine that decides on it, and
`commands` what may be asked of it.
"""
