"""Snapshots on disk: durable, checked, readable by others.

The format, version 1:

    DATA_DIR/snapshots/000000001200/                    one folder per version: the number of updates, 12 digits
        MANIFEST.json                                   written last; a folder without one is not a snapshot
        shard-0-of-2-0123456789abcdef.safetensors       one part per shard, named by the start of its SHA-256
        shard-1-of-2-fedcba9876543210.safetensors       (parts of servers with a disk of their own lie there instead)

MANIFEST.json is ASCII JSON, exactly as Python's json.dumps(..., indent=1) prints it: first
"sha256", the SHA-256 of the file as it would be with "" there, then "format" (1), "job",
"version", "index" (place in the job's log), "shards", "created" (ISO 8601), "model" (tensors:
name, shape, dtype, role, group; optimizer: name, groups), "parts" (by shard: file, nbytes,
sha256 of the whole file), "elsewhere" (parts that were not in this folder when it was written),
"coordinator" (its own JSON: data position, pushes already counted) and "libraries".

A part is a safetensors file of one-dimensional tensors named KIND@START. KIND is "weight" or a
state of the optimizer ("exp_avg"); START is where its first byte lies on the model's tape
(pscommon/core/partition.py), which "model" decides. Any bytes of the tape that are padding
between tensors have no meaning. The part's metadata hold "steps" (JSON: index of a tensor to the
optimizer steps it got) and "groups" (JSON: hyper-parameters of each group). Where the optimizer
keeps numbers once for each tensor (NAdam: "mu_product"; ASGD: "eta" and "mu"), they also hold
"scalars": JSON, the name to an object of index of a tensor to number. A tensor that is cut has
its steps and scalars in each part that has a piece of it, and they are equal there.

Everything is little-endian. Nothing in here is ever executed. `ps-ctl snapshot export` makes a
plain safetensors file of the weights by name.
"""

from pscommon.snapshot.data_dir_lock import DataDirLock
from pscommon.snapshot.export import export, tensors_in_buffer, write_model
from pscommon.snapshot.manifest import Manifest, SnapshotPart
from pscommon.snapshot.range_reader import SnapshotReader
from pscommon.snapshot.snapshot_dir import NewestSnapshot, SnapshotDirectory

__all__ = [
    "DataDirLock",
    "Manifest",
    "NewestSnapshot",
    "SnapshotDirectory",
    "SnapshotPart",
    "SnapshotReader",
    "atomic_files",
    "export",
    "manifest",
    "tensor_file",
    "tensors_in_buffer",
    "weights_digest",
    "write_model",
]
