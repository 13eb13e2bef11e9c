"""Export of the job's weights to one safetensors file, from any worker."""

import os
from pathlib import Path

from pscommon.core.errors import InvalidRequestError, NotSavedError, SnapshotError
from pscommon.snapshot import tensors_in_buffer, write_model
from pscommon.system.small_files import why_no_file
from psworker.core.protocols import JobClient
from psworker.model.adapter import ModelAdapter


def save(
    client: JobClient, adapter: ModelAdapter, version: int, file: str | os.PathLike[str]
) -> None:
    """Write the newest weights to a safetensors file, as `Job.save` describes.

    Args:
        client: The connection to the job.
        adapter: The model. While the job has no newer version, the file has this model's values of
            the buffers without an average: the script may have changed them since its last step.
        version: Version of the job whose buffers the model has.
        file: The file.

    Raises:
        InvalidRequestError: No file can be written there.
        NotSavedError: The disk refuses the file.
    """
    path = Path(file)
    if problem := why_no_file(path):
        raise InvalidRequestError(f"job.save({os.fspath(file)!r}) failed: {problem}")
    plan, memory, newest = client.newest()
    # names and order as this worker registered them: the servers may have registered the model
    # with an older release
    own = {tensor.name: tensor for tensor in adapter.spec.tensors}
    by_name = dict(
        zip((t.name for t in plan.spec.tensors), tensors_in_buffer(plan, memory), strict=True)
    )
    if newest == version:
        by_name |= adapter.own_buffers()
    try:
        write_model(path, adapter.spec, [by_name[name] for name in own])
    except SnapshotError as error:
        raise NotSavedError(f"job.save failed: {error}") from error
