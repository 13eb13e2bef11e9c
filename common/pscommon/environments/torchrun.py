"""torchrun: its processes are workers, or the ranks of one worker."""

from pscommon.environments.place import Place, Role, Surroundings, check_index, number_in

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def torchrun(here: Surroundings, role: Role | None) -> Place | None:
    """Return the place of a process that torchrun started: one worker for each process.

    In a group (`ps-worker --group`, PS_GROUP=1) the processes are the ranks of one worker. The
    environment around torchrun then tells which worker that is. LOCAL_RANK distinguishes torchrun
    from operators that set RANK and WORLD_SIZE for a pod.

    Raises:
        InvalidRequestError: A variable is malformed.
    """
    environ = here.environ
    is_group = environ.get("PS_GROUP", "").strip().lower() not in ("", "0", "off", "no", "false")
    if role == "server" or is_group or not all(environ.get(name) for name in VARIABLES):
        return None
    rank, count, _ = (number_in(environ, name) for name in VARIABLES)
    return Place(
        environment="torchrun",
        variables=VARIABLES,
        role="worker",
        index=check_index("RANK", rank or 0, count),
        workers=count,
    )
