"""Pods of Kubernetes: named servers of a StatefulSet, indexed Jobs, Kubeflow Trainer v2.

Kubernetes tells a pod neither the number of servers nor their addresses. The manifest names them
once, in PS_ALL_SERVERS, for the pods of servers and of workers.
"""

from pscommon.core.errors import InvalidRequestError
from pscommon.environments.place import (
    Place,
    Role,
    Surroundings,
    check_addresses,
    check_index,
    expand_hosts,
    number_in,
)
from pscommon.settings import values


def named_servers(here: Surroundings, role: Role | None) -> Place | None:
    """Return the place in PS_ALL_SERVERS, such as ps-[0-1].ps:50051; shard 0 is the first.

    A pod whose name is the first label of an address, or its IP address, is that server. The name
    is POD_NAME, which the downward API can set, or the host name. It need not end with the number
    of the shard: the place in the list counts. Other pods only learn the addresses.

    Raises:
        InvalidRequestError: The list is malformed.
    """
    name = "PS_ALL_SERVERS"
    if not here.environ.get(name, "").strip():
        return None
    addresses = check_addresses(name, expand_hosts(name, here.environ[name]))
    own, variable = here.environ.get("POD_NAME"), "POD_NAME"
    if not own:
        own, variable = here.host_name.partition(".")[0], "the host name"
    hosts = [values.host_and_port(address)[0] for address in addresses]
    labels = [host if values.is_ip_address(host) else host.partition(".")[0] for host in hosts]
    if role == "worker" or labels.count(own) != 1:
        return Place(
            environment=name, variables=(name,), servers=len(addresses), addresses=addresses
        )
    return Place(
        environment=name,
        variables=(name, variable),
        role="server",
        index=labels.index(own),
        servers=len(addresses),
        addresses=addresses,
        address=addresses[labels.index(own)],
    )


def trainer(here: Surroundings, role: Role | None) -> Place | None:
    """Return the place of a trainer node in a TrainJob of Kubeflow Trainer v2 (torch policy).

    The operator sets PET_NNODES and PET_NODE_RANK in the pods of the step "trainer", for torchrun
    in them. Without torchrun each pod is one worker.

    Raises:
        InvalidRequestError: A variable is malformed.
    """
    environ = here.environ
    if role == "server" or not environ.get("PET_NODE_RANK") or not environ.get("PET_NNODES"):
        return None
    rank = number_in(environ, "PET_NODE_RANK")
    # torchrun also accepts MIN:MAX, which is no number of workers
    count = None if ":" in environ["PET_NNODES"] else number_in(environ, "PET_NNODES")
    if count == 0:
        raise InvalidRequestError("PET_NNODES=0 is not valid. Try: at least 1, or unset it")
    return Place(
        environment="Kubeflow Trainer",
        variables=("PET_NODE_RANK", "PET_NNODES"),
        role="worker",
        index=check_index("PET_NODE_RANK", rank or 0, count),
        workers=count,
    )


def indexed_job(here: Surroundings, role: Role | None) -> Place | None:
    """Return the rank of a worker in an indexed Job.

    The index of a server is not taken from it: the number of servers would be missing, and a
    JobSet may have one Job for each server.

    Raises:
        InvalidRequestError: JOB_COMPLETION_INDEX is malformed.
    """
    name = "JOB_COMPLETION_INDEX"
    index = number_in(here.environ, name)
    if index is None or role == "server":
        return None
    return Place(environment="indexed Job", variables=(name,), role="worker", index=index)
