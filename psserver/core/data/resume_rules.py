"""What a resumed run may change: hyper-parameters of the optimizer, and epochs of the last loop.

Everything else must be unchanged. The errors here name the difference, what the job was resumed
from, and a remedy.
"""

from dataclasses import replace

from pscommon.core.data_stream import Spec
from pscommon.core.errors import MismatchError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from pscommon.core.script_place import PassName

START_OVER = (
    "start over with `--resume never` (snapshots are moved aside), or choose another `--data-dir`"
)


def adopted_model(mine: ModelSpec, job: ModelSpec) -> ModelSpec | None:
    """Return the job's model with the hyper-parameters and the tensor aliases of `mine`.

    Older releases did not store aliases. None: the models differ in more than hyper-parameters.
    """
    if _classes(mine) != _classes(job):
        return None
    if replace(mine, optimizer=job.optimizer).differences(job):
        return None
    aliases = {tensor.name: tensor.aliases for tensor in mine.tensors}
    tensors = tuple(replace(tensor, aliases=aliases[tensor.name]) for tensor in job.tensors)
    return replace(job, tensors=tensors, optimizer=mine.optimizer)


def _classes(model: ModelSpec) -> list[tuple[str, str, int]]:
    """Return name, class and number of groups of each optimizer."""
    return [(name, each.name, len(each.groups)) for name, each in model.optimizers.items()]


def hyper_parameter_changes(before: OptimizerSettings, after: OptimizerSettings) -> str:
    """Return the differences of two optimizers of one class, as "lr 0.1 -> 0.05"; may be empty."""
    several = len(before.groups) > 1
    clips = before.clip_norm, after.clip_norm
    clip_norm = [f"clip_norm {clips[0]!r} -> {clips[1]!r}"] if clips[0] != clips[1] else []
    return ", ".join(
        clip_norm
        + [
            f"{f'group {index} ' if several else ''}{key} {old.get(key)!r} -> {new.get(key)!r}"
            for index, (old, new) in enumerate(zip(before.groups, after.groups, strict=True))
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
    )


def model_mismatch(mine: ModelSpec, job: ModelSpec, origin: str) -> MismatchError:
    """Return the error for a worker whose model `mine` differs from the job's.

    origin: What the job was resumed from, for the message; empty for a new job.
    """
    resumed = bool(origin) and adopted_model(mine, job) is None
    where = f"that of {origin}" if resumed else "the job's"
    remedy = (
        f"run the script that wrote it, {START_OVER}"
        if resumed
        else "start all workers with the same script and the same arguments"
    )
    lines = "\n  ".join(mine.differences(job))
    return MismatchError(
        f"this worker's model is not {where}:\n  {lines}\nTry: {remedy}", "MODEL_MISMATCH"
    )


def loop_mismatch(
    mine: Spec, job: Spec, name: PassName | None, origin: str, reason: str
) -> MismatchError:
    """Return the error for a worker whose loop `mine` differs from the job's.

    Args:
        name: The pass that the loop is; None: it has a number only.
        origin: What the loop was resumed from, for the message; empty if this run has begun it.
        reason: Why the epochs cannot be raised; empty if that is not the problem.
    """
    what = f"loop {job.loop + 1}" if name is None else str(name)
    if another_order(mine, job):
        return MismatchError(
            f"the sampler {mine.as_dict()['sampler']} gave another order in {what} than in "
            f"{origin or 'the job'}: {_differences(mine, job)}. Try: a sampler whose order depends "
            "only on data that all workers share and on the global generators of torch, numpy and "
            "random, which are seeded by (seed, pass)",
            "LOOP_MISMATCH",
        )
    if origin:
        remedy = f"run the unchanged script, {START_OVER}"
    else:
        remedy = (
            "the same job.batches calls on all workers, or name= each; for a pass of one worker "
            "torch's DataLoader"
        )
    return MismatchError(
        f"{what} of this script is not that of {origin or 'the job'}: "
        f"{_differences(mine, job)}{'; ' if reason else ''}{reason}. Try: {remedy}",
        "LOOP_MISMATCH",
    )


def another_order(mine: Spec, job: Spec) -> bool:
    """Return whether the same sampler gave a different order."""
    theirs, ours = job.as_dict(), mine.as_dict()
    return (
        "sampler" in ours
        and ours["sampler"] == theirs.get("sampler")
        and ours["order"] != theirs["order"]
    )


def only_epochs_differ(mine: Spec, job: Spec) -> bool:
    """Return whether the loops differ in their number of epochs and in nothing else."""
    return (
        type(mine) is type(job)
        and mine.epochs != job.epochs
        and replace(mine, epochs=job.epochs) == job
    )


def why_not_extended(mine: Spec, job: Spec, last: bool, first: bool, is_outstanding: bool) -> str:
    """Return why a loop cannot continue with the epochs of `mine`; empty if it can.

    Args:
        last: No later loop exists.
        first: No worker of this run has reached the loop yet.
        is_outstanding: Batches are leased whose numbers would change their meaning.
    """
    if mine.epochs < job.epochs:
        return f"a resumed job cannot have fewer epochs than the {job.epochs} it was started with"
    if not last:
        return "only the last loop of a job can get more epochs, and this job has a later one"
    if not first:
        return "only the first worker after a resume can raise the epochs; this is a later worker"
    if is_outstanding:
        return (
            "workers of the previous run hold batches of this stream, so its epochs cannot be "
            "raised yet"
        )
    return ""


def _differences(mine: Spec, job: Spec) -> str:
    theirs, ours = job.as_dict(), mine.as_dict()
    return "; ".join(
        f"{name} is {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    )
