"""The process group of torch for the ranks of a group."""

import secrets

import torch
import torch.distributed as dist

from pscommon.core.errors import InvalidRequestError
from psworker.core.protocols import GroupPlace

NAME_BYTES = 16


def join_process_group(place: GroupPlace, device: torch.device) -> None:
    """Make torch's process group of all ranks, unless the script has made it.

    Raises:
        InvalidRequestError: The script's process group has other ranks.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=place.rank, world_size=place.size)
    if (dist.get_rank(), dist.get_world_size()) != place:
        raise InvalidRequestError(
            f"the script's process group has {dist.get_world_size()} ranks, and this group has "
            f"{place.size}. Try: init_process_group() without arguments, or leave it to connect()"
        )


def shared_name(device: torch.device) -> str:
    """Return a random name, the same on all ranks."""
    has_cpu = "gloo" in str(dist.get_backend_config())
    where = torch.device("cpu") if has_cpu else device
    name = torch.frombuffer(bytearray(secrets.token_bytes(NAME_BYTES)), dtype=torch.uint8)
    name = name.to(where)
    dist.broadcast(name, 0)
    return bytes(name.tolist()).hex()
