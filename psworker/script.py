"""Runs a user's training script as __main__ inside a worker, and turns how it ended into an exit code."""

import importlib.util
import logging
import os
import runpy
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from pscommon.config import tell
from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.exits import Exit
from psworker import drain

# A launcher that shows a failed worker's traceback itself, once, names the file that it reads it from.
TRACEBACK_FILE = "PS_TRACEBACK_FILE"

log = logging.getLogger("psworker")


@dataclass(frozen=True, slots=True)
class Script:
    """What to run: the path of a file, or a module's name; and the arguments that are the script's own business."""

    target: str
    module: bool = False
    args: tuple[str, ...] = ()

    def check(self) -> None:
        """InvalidRequestError where there is nothing to run. Imports the parents of a module, as running it would."""
        if self.module:
            _check_module(self.target)
        elif not Path(self.target).exists():
            raise InvalidRequestError(f"no such script: {self.target}")
        elif Path(self.target).is_dir() and not Path(self.target, "__main__.py").exists():
            raise InvalidRequestError(f"{self.target} has no __main__.py")

    @property
    def folder(self) -> str:
        """What Python puts first on sys.path: the script's folder; for a module the current one."""
        return os.getcwd() if self.module else str(Path(self.target).resolve().parent)


def run(script: Script, debug: bool = False) -> int:
    """Runs it to its end in this process; returns the exit code of that end.

    A PSError gives its own exit code and one line on stderr (with `debug` its traceback too), any other exception its
    traceback and 1, sys.exit(n) gives n, Ctrl-C 130. SIGTERM asks a worker that is in a job to leave at its next step
    boundary (psworker.drain). A second one, or one to a script that is in no job, unwinds the script like sys.exit with
    143, so `with` blocks and exit handlers leave the job properly; the next ends the process at once.
    """
    _terminate_on_sigterm()
    try:
        _put_first(script.folder)
        script.check()
        _execute(script)
    except SystemExit as end:
        return _status(end)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except drain.DrainedError as end:
        log.info("the script ends here: %s", end)
        return Exit.DONE
    except PSError as error:
        _remember(error)
        tell("ps-worker", error, debug)
        return error.exit_code
    except BaseException as error:
        _remember(error)
        _show(error)
        return Exit.BUG
    return Exit.DONE


def _execute(script: Script) -> None:
    sys.argv = [script.target, *script.args]
    if script.module:
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script.target, run_name="__main__")


def _put_first(folder: str) -> None:
    """Like `python script.py`: the script's folder takes the place of the folder that the interpreter put first."""
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


def _check_module(name: str) -> None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that a parent package imports: the user's traceback, not ours
        spec = None
    if spec is None:
        raise InvalidRequestError(f"no module named {name}")
    if spec.submodule_search_locations is not None and importlib.util.find_spec(f"{name}.__main__") is None:
        raise InvalidRequestError(f"{name} is a package without a __main__ module, so it cannot be run")


def _terminate_on_sigterm() -> None:
    def terminate(signum: int, _: FrameType | None) -> None:
        if drain.ask_all():
            return
        signal.signal(signum, signal.SIG_DFL)
        raise SystemExit(Exit.TERMINATED)

    signal.signal(signal.SIGTERM, terminate)


def _status(end: SystemExit) -> int:
    """The exit code that the interpreter would have given: sys.exit("text") prints the text and means 1."""
    if end.code is None:
        return Exit.DONE
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return Exit.BUG


def _remember(error: BaseException) -> None:
    """What the interpreter itself does with an uncaught exception: exit handlers and debuggers find it there."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def _show(error: BaseException) -> None:
    """The script's own traceback, without our frames above it; once, in the launcher's file or else on stderr."""
    lines = traceback.format_exception(type(error), error, _from_script(error.__traceback__))
    path = os.environ.get(TRACEBACK_FILE)
    if path:
        Path(path).write_text("".join(lines), encoding="utf-8")
    else:
        sys.stderr.write("".join(lines))
        sys.stderr.flush()


def _from_script(frames: TracebackType | None) -> TracebackType | None:
    ours = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib.util>", "<frozen importlib._bootstrap>")
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames
