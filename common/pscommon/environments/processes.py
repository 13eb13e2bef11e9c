"""Spark and Ray: their tasks run in processes that know their place, not in variables.

Nothing is imported: a process that has not imported the engine's package runs none of its tasks.
"""

from typing import Any

from pscommon.environments.place import Place, Role, Surroundings


def spark(here: Surroundings, role: Role | None) -> Place | None:
    """Return the rank of the running task of a barrier stage, whose tasks start together.

    The tasks of other stages run one after another and have no rank.
    """
    package: Any = here.modules.get("pyspark")
    context = package.TaskContext.get() if package is not None else None  # None in the driver
    if context is None:
        return None
    is_barrier = role != "server" and isinstance(context, package.BarrierTaskContext)
    return Place(
        environment="Spark",
        variables=(type(context).__name__,),
        role="worker" if is_barrier else role,
        index=context.partitionId() if is_barrier else None,
        workers=len(context.getTaskInfos()) if is_barrier else None,
    )


def ray(here: Surroundings, role: Role | None) -> Place | None:
    """Return a place without index if a task or actor of Ray is running.

    Ray tells no rank; `ray.train` with torch sets the variables of torchrun. The place states
    that the variables of other engines are those of Ray's own processes.
    """
    package = here.modules.get("ray")
    if package is None or not package.is_initialized():
        return None
    if package.get_runtime_context().worker.mode != package.WORKER_MODE:
        return None
    return Place(environment="Ray", variables=("get_runtime_context()",), role=role)
