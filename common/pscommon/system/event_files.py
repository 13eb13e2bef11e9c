"""Event files that TensorBoard reads. The package tensorboardX, an extra, is imported on demand."""

import re
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from pscommon.core.errors import InvalidRequestError

FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def check_tensorboard(folder: Path) -> None:
    """Create the folder of `--tensorboard` if it is missing, and check that files can be written.

    Raises:
        InvalidRequestError: They cannot, or tensorboardX is not installed.
    """
    if find_spec("tensorboardX") is None:
        raise InvalidRequestError(
            f"`--tensorboard {folder}` needs the package tensorboardX. "
            "Try: `pip install 'paramserver[tensorboard]'`"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidRequestError(
            f"`--tensorboard {folder}` cannot be written: {error.strerror}. "
            "Try: another directory, or give this user the right to write there"
        ) from error


class EventFile:
    """A new event file. It hides the points of earlier files of its folder from `purge_step` on.

    Raises:
        OSError: The file cannot be written; none is left. `write` and `flush` raise it, too.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        # absolute: tensorboardX takes what is before a colon for a protocol
        path = _new_path(folder.resolve())
        self._records = RecordWriter(str(path))
        try:
            now, start = time.time(), SessionLog(status=SessionLog.START)
            for event in (
                Event(wall_time=now, step=purge_step, file_version="brain.Event:2"),
                Event(wall_time=now, step=purge_step, session_log=start),
            ):
                self._records.write(event.SerializeToString())
            self.flush()
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, step: int, wall_time: float, values: Mapping[str, float]) -> None:
        """Write one point of each curve; `values` has them by tag."""
        points = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        event = self._event(step=step, wall_time=wall_time, summary=self._summary(value=points))
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Return once everything is on the disk."""
        self._records.flush()

    def close(self) -> None:
        """Close the file. Points since the last `flush` may be lost."""
        with suppress(OSError):
            self._records.close()


def _new_path(folder: Path) -> Path:
    """Return a name behind those of the folder's event files: TensorBoard reads them by name."""
    found = [int(match[1]) for path in folder.iterdir() if (match := FILE_NAME.match(path.name))]
    seconds = max([int(time.time()), *(number + 1 for number in found)])
    return folder / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}"
