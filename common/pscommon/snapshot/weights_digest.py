"""One number for all weights, to tell whether two runs ended alike."""

import hashlib
from collections.abc import Mapping
from typing import Any


def weights_sha256(named: Mapping[str, Any]) -> str:
    """SHA-256, in hex, over the bytes of all tensors, one after another in the order of their
    names.

    named: buffers by name, C-contiguous and little-endian: numpy arrays, memoryviews, bytes.
    Names are ordered by code point. Names, shapes and dtypes are not part of it, only the bytes
    are.
    """
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(named[name])
    return digest.hexdigest()
