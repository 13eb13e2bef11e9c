"""Snapshots on disk: durable, checked, and readable by other tools.

The format, version 1:

    DATA_DIR/snapshots/000000001200/               one folder per version, 12 digits
        MANIFEST.json                              written last; without it there is no snapshot
        shard-0-of-2-0123456789abcdef.safetensors  one part per shard; the name ends with the
        shard-1-of-2-fedcba9876543210.safetensors  start of the part's SHA-256

A server with its own disk stores its part in its own data directory.

MANIFEST.json is ASCII JSON, exactly as Python's json.dumps(..., indent=1) prints it. Its keys, in
this order:

    sha256       SHA-256 of the file with "" in this place
    format       1
    job          name of the job
    version      number of updates
    index        index in the job's log
    shards       number of shards
    created      ISO 8601
    model        tensors (name, shape, dtype, role, group; aliases if there are any) and optimizer
                 (name, groups; clip_norm if it is set); several optimizers are a list of
                 [their name in the job, such an optimizer]
    parts        by shard: file, nbytes, sha256 of the whole file
    elsewhere    parts that were not in this folder when it was written
    coordinator  the coordinator's own JSON: data position, pushes already counted
    libraries    versions of libraries

A part is a safetensors file of one-dimensional tensors named KIND@START. KIND is "weight" or a
state of the optimizer ("exp_avg"). START is the position of its first byte in the model's flat
buffer (pscommon/core/partition.py), which "model" determines. Padding between tensors has no
meaning. The part's metadata are:

    steps    JSON: index of a tensor to the number of its optimizer steps
    groups   JSON: hyper-parameters of each parameter group
    scalars  JSON: name to an object of index of a tensor to number; only if the optimizer keeps
             one number for each tensor (NAdam: "mu_product"; ASGD: "eta" and "mu")

A tensor that is cut has its steps and scalars in each part that has a slice of it, with equal
values.

All numbers are little-endian. No part of a snapshot is ever executed. `ps-ctl snapshot export`
writes a plain safetensors file of the weights by name.
"""

from pscommon.snapshot.data_dir_lock import DataDirLock
from pscommon.snapshot.export import export, tensors_in_buffer, weights_sha256, write_model
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
    "weights_sha256",
    "write_model",
]
