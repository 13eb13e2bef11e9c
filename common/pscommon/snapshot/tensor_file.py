"""Incremental writer of safetensors files.

The safetensors library writes all bytes in one call and occupies the CPU core meanwhile. That made
the longest step during a snapshot of 100 MB 50 ms longer (benchmarks, work `snapshots`).
"""

import hashlib
import json
from collections.abc import Mapping
from itertools import accumulate, chain
from pathlib import Path

import torch

RESERVED = "__metadata__"
"""Name that the format reserves."""

PART_BYTES = 256 << 10
"""Size of one write call, in bytes."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> str:
    """Write contiguous CPU tensors, by name, to a safetensors file that must not exist.

    It is not durable yet. Return its SHA-256 in hex. Raises OSError.
    """
    aligned = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for data in chain([_header(aligned, metadata)], map(raw, aligned.values())):
            for start in range(0, len(data), PART_BYTES):
                part = data[start : start + PART_BYTES]
                digest.update(part)
                file.write(part)
    return digest.hexdigest()


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> memoryview:
    """Return the header: its length in 8 bytes, then JSON padded with blanks.

    See https://huggingface.co/docs/safetensors, "Format".
    """
    stops = accumulate(tensor.nbytes for tensor in tensors.values())
    entries = {
        name: {
            "dtype": DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [stop - tensor.nbytes, stop],
        }
        for (name, tensor), stop in zip(tensors.items(), stops, strict=True)
    }
    text = json.dumps({RESERVED: dict(metadata), **entries}).encode("ascii")
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, writable."""
    return tensor.view(-1).view(torch.uint8).numpy().data
