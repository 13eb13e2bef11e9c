"""Run a training script as __main__ inside a worker, and map its end to an exit code."""

import _thread
import builtins
import importlib.util
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.exit_codes import ExitCode
from pscommon.settings.command import print_error
from pscommon.telemetry.logs import get_logger
from psworker.session import drain

TRACEBACK_FILE = "PS_TRACEBACK_FILE"
"""Variable with the file for the traceback of the script; set by a launcher that shows it."""

LEAVING_MESSAGE = b"ps-worker: leaving after this step; Ctrl-C again ends the script at once\n"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Script:
    """Script to run.

    Attributes:
        target: path of a file, or name of a module or a function.
        module: whether `target` is the name of a module.
        function: what runs instead of a file or module, in this process as it is.
    """

    target: str
    module: bool = False
    args: tuple[str, ...] = ()
    function: Callable[[], object] | None = None

    def spec(self) -> ModuleSpec | None:
        """Return the spec of a module, folder or zip file; None for a plain file.

        Imports the parents of a module. Raises InvalidRequestError without such a script or module.
        """
        if self.module:
            return _module_spec(self.target)
        if not Path(self.target).exists():
            raise InvalidRequestError(f"cannot run {self.target}: there is no such script")
        if not self._holds_modules:
            return None
        spec = pkgutil.get_importer(self.path).find_spec("__main__")  # type: ignore[union-attr]
        if spec is None:
            raise InvalidRequestError(f"cannot run {self.target}: it has no __main__.py")
        return spec

    @property
    def folder(self) -> str:
        """Return the first entry of sys.path: the folder of the script, or the current folder.

        A script that is a folder or a zip file is itself the entry.
        """
        if self.module:
            return os.getcwd()
        return self.path if self._holds_modules else str(Path(self.target).resolve().parent)

    @property
    def _holds_modules(self) -> bool:
        """Return whether the script is a folder or a zip file."""
        return pkgutil.get_importer(self.path) is not None

    @property
    def path(self) -> str:
        """Return the absolute path; the script may change the current folder."""
        return os.path.join(os.getcwd(), self.target)


def run(script: Script, debug: bool = False) -> int:
    """Run the script in this process and return its exit code.

    A PSError gives its own exit code and one line on stderr, with `debug` also a traceback. Any
    other exception gives its traceback and 1; sys.exit(n) gives n.

    The first SIGTERM or Ctrl-C asks a worker in a job to leave at its next step boundary
    (psworker.session.drain), which raises Stopping in the script. The exit code is 0 after
    SIGTERM, 130 after Ctrl-C. A second signal, or a signal without a job, unwinds the script:
    SIGTERM raises SystemExit(143), Ctrl-C KeyboardInterrupt. `with` blocks and exit handlers run.
    A further SIGTERM ends the process at once.
    """
    interrupted = _leave_on_signals()
    code = _run(script, debug)
    return ExitCode.INTERRUPTED if interrupted() and code == ExitCode.DONE else code


def _run(script: Script, debug: bool) -> int:
    try:
        if script.function is not None:
            script.function()
        else:
            _put_first(script.folder)
            _execute(script)
    except drain.Stopping as end:
        log.info("script_ended", reason=str(end))
        return ExitCode.DONE
    except SystemExit as end:
        return _status(end)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except drain.DrainedError as end:
        log.info("script_ended", reason=str(end))
        return ExitCode.DONE
    except PSError as error:
        _remember(error)
        print_error("ps-worker", error, debug)
        return error.exit_code
    except BaseException as error:
        _remember(error)
        _report(error)
        return ExitCode.BUG
    return ExitCode.DONE


def _execute(script: Script) -> None:
    """Execute the script in a new module __main__, which exists until the exit handlers ran."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    sys.argv = [script.target, *script.args]
    spec = script.spec()
    if spec is None:
        code = _load_file(main, script.path)
    else:
        if script.module:
            sys.argv[0] = str(spec.origin)
        code = _load(main, spec)
    if code is None:
        raise InvalidRequestError(f"cannot run {script.target}: it contains no Python code")
    exec(code, main.__dict__)


def _load_file(main: ModuleType, path: str) -> CodeType | None:
    kind = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    loader = kind("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    if isinstance(loader, SourceFileLoader):
        # get_code would write a __pycache__
        return loader.source_to_code(loader.get_data(path), path)
    return loader.get_code("__main__")


def _load(main: ModuleType, spec: ModuleSpec) -> CodeType | None:
    loader: Any = spec.loader
    main.__dict__.update(
        __spec__=spec,
        __loader__=loader,
        __file__=spec.origin,
        __cached__=spec.cached,
        __package__=spec.parent,
    )
    code: CodeType | None = loader.get_code(spec.name)
    return code


def _put_first(folder: str) -> None:
    """Put the folder first on sys.path, as `python script.py` does."""
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


def _module_spec(name: str) -> ModuleSpec:
    spec = _find(name)
    if spec is None:
        raise InvalidRequestError(f"cannot run {name}: there is no such module")
    if spec.submodule_search_locations is None:
        return spec
    inner = _find(f"{name}.__main__")
    if inner is None:
        raise InvalidRequestError(f"cannot run {name}: the package has no __main__ module")
    return inner


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an import inside a parent package fails: show the user's traceback
        return None


def _leave_on_signals() -> Callable[[], bool]:
    """Install the signal handlers; return a function that tells whether Ctrl-C was pressed."""
    interrupts: list[int] = []

    def ask_all(signum: int) -> bool:
        asked = drain.ask_all()
        if asked:  # not logged here: the interrupted code may hold a lock of the log
            _thread.start_new_thread(_log_request, (signum,))
        return asked

    def terminate(signum: int, _: FrameType | None) -> None:
        if ask_all(signum):
            return
        signal.signal(signum, signal.SIG_DFL)
        raise SystemExit(ExitCode.TERMINATED)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not ask_all(signum):
            signal.default_int_handler(signum, frame)
        interrupts.append(signum)
        if os.isatty(2):
            os.write(2, LEAVING_MESSAGE)

    signal.signal(signal.SIGTERM, terminate)
    # SIGINT stays ignored under nohup
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    return lambda: bool(interrupts)


def _log_request(signum: int) -> None:
    log.info(
        "leave_requested",
        signal=signal.Signals(signum).name,
        effect="psworker.Stopping ends the script after this step; except KeyboardInterrupt does "
        "not catch it",
    )


def _status(end: SystemExit) -> int:
    """Return the exit code as the interpreter does: sys.exit("text") prints the text, gives 1."""
    if end.code is None:
        return ExitCode.DONE
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return ExitCode.BUG


def _remember(error: BaseException) -> None:
    """Set sys.last_value and others, as the interpreter does, for exit handlers and debuggers."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def _report(error: BaseException) -> None:
    """Report an exception by the script's sys.excepthook, or print its traceback."""
    if sys.excepthook is not sys.__excepthook__:
        try:
            sys.excepthook(type(error), error, _from_script(error.__traceback__))
        except BaseException:
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()
        else:
            return
    _show(error)


def _show(error: BaseException) -> None:
    """Write the traceback without frames of this module, to TRACEBACK_FILE or stderr."""
    lines = traceback.format_exception(type(error), error, _from_script(error.__traceback__))
    path = os.environ.get(TRACEBACK_FILE)
    if path:
        Path(path).write_text("".join(lines), encoding="utf-8")
    else:
        sys.stderr.write("".join(lines))
        sys.stderr.flush()


def _from_script(frames: TracebackType | None) -> TracebackType | None:
    frozen = (
        "importlib.util",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
        "zipimport",
    )
    ours = (__file__, *(f"<frozen {name}>" for name in frozen))
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames
