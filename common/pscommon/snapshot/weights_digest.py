"""Digest of all weights, to compare the results of two runs."""

import hashlib
from collections.abc import Mapping
from typing import Any


def weights_sha256(named: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of the bytes of all tensors, concatenated by name.

    Names are ordered by code point. Names, shapes and dtypes do not affect the digest.

    Args:
        named: Buffers by name, C-contiguous and little-endian: numpy arrays, memoryviews or bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(named[name])
    return digest.hexdigest()
