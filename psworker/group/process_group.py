"""What the processes of a group have before a job: their link and the process group of torch."""

import atexit
import socket
import sys
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from pscommon.core.errors import InvalidRequestError
from psworker.core.group_place import GroupPlace
from psworker.group.link import GroupLink

_links: list[GroupLink] = []

NAMES_OF_GROUP = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables that are equal on the ranks of one attempt of a group, and of no other one."""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""If it is True, torch looks for the addresses of a process group where torchrun has written them,
and after a restart finds those of the processes before (pytorch issue 167288).
"""


def open_link(place: GroupPlace, environ: MutableMapping[str, str]) -> GroupLink:
    """Return this process's connections to the other ranks, which the first call opens.

    It also sets MASTER_ADDR and MASTER_PORT to a free port, which is new for each attempt.

    Raises:
        UnreachableError: The ranks do not meet on this machine.
    """
    if _links:
        return _links[0]
    link = GroupLink(place, "-".join(environ.get(name, "") for name in NAMES_OF_GROUP))
    _links.append(link)
    atexit.register(_close, link)
    if not dist.is_initialized():
        port = free_port() if not link.rank else 0
        if link.rank:
            port = link.receive()
        else:
            link.spread(port)
        environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        environ[AGENT_STORE] = "False"
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine
    return link


def settle() -> None:
    """Give the end of another rank, which may be why this one fails, the time to end this one."""
    for link in _links:
        link.settle()


def _close(link: GroupLink) -> None:
    link.close(is_done=getattr(sys, "last_value", None) is None)


def free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def join_process_group(place: GroupPlace, device: torch.device) -> None:
    """Make torch's process group of all ranks, unless the script has made it.

    Raises:
        InvalidRequestError: The script's process group has other ranks.
    """
    if not dist.is_initialized():
        # NCCL refuses ranks that share a GPU; gloo serves them
        own_gpus = device.type == "cuda" and place.size <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if own_gpus else "gloo"
        dist.init_process_group(backend, rank=place.rank, world_size=place.size)
    if (dist.get_rank(), dist.get_world_size()) != place:
        raise InvalidRequestError(
            f"the script's process group has {dist.get_world_size()} ranks, and this group has "
            f"{place.size}. Try: init_process_group() without arguments, or leave it to connect()"
        )
