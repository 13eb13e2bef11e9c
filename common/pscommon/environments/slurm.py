"""Slurm: the tasks of one srun are all servers or all workers, as the command says.

A batch script has one srun for ps-server and one for ps-worker. A step knows only its own nodes,
so the script tells the workers the addresses of the servers: PS_ALL_SERVERS or PS_SERVERS.
"""

from pscommon.environments.place import (
    Place,
    Role,
    Surroundings,
    check_index,
    expand_hosts,
    number_in,
)
from pscommon.settings.values import FIRST_PORT, LAST_PORT


def slurm(here: Surroundings, role: Role | None) -> Place | None:
    """Return the place in a job step; None: this process is in no step, but for example in the
    batch script.

    The variables are those of srun's manual page, "output environment variables".

    Raises:
        InvalidRequestError: A variable is malformed.
    """
    environ = here.environ
    variables = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if not all(environ.get(name) for name in variables):
        return None
    index, count = (number_in(environ, name) for name in variables)
    index = check_index("SLURM_PROCID", index or 0, count)
    if role != "server":
        return Place(
            environment="Slurm",
            variables=variables,
            role=role,
            index=index,
            workers=count if role else None,
        )
    nodes, own = environ.get("SLURM_STEP_NODELIST", ""), environ.get("SLURMD_NODENAME")
    first = expand_hosts("SLURM_STEP_NODELIST", nodes)[0] if nodes else None
    port = FIRST_PORT + index
    return Place(
        environment="Slurm",
        variables=(
            *variables,
            *(["SLURM_STEP_NODELIST"] if first else []),
            *(["SLURMD_NODENAME"] if own else []),
        ),
        role="server",
        index=index,
        servers=count,
        addresses=(f"{first}:{FIRST_PORT}",) if first else (),
        address=f"{own}:{port}" if own and port <= LAST_PORT else None,
    )
