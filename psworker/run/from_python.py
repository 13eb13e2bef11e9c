"""`launch`: run a function on servers and workers, as ps-run runs a script.

The function may be one of a notebook's cell, which no other program can import, so the workers are
forked copies of this process. gRPC survives no fork, and ps-run uses it. So this process forks one
that runs ps-run, which forks the processes of its workers before it calls servers. They wait for
the arguments that ps-run would start ps-worker with. This process only reads output.
"""

import atexit
import codecs
import json
import os
import selectors
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from pscommon.core.errors import REASONS, InvalidRequestError, PSError, error_for
from pscommon.settings.command import run_command
from psworker import cli as worker
from psworker.connection.connection import close_all, is_used
from psworker.run import cli
from psworker.supervision.orphan_guard import end_with_parent

Body = Callable[[], int]
READ_BYTES = 1 << 16


def launch(
    fn: Callable[[], object], servers: int = 2, workers: int = 2, **settings: Any
) -> dict[str, Any]:
    """Run a function on servers and workers of this machine, as `ps-run` runs a script.

    Each worker calls the function, which calls `psworker.connect()`. It runs in a forked copy of
    this process, so it may be defined in a notebook and read variables of this process; what it
    changes is not seen here. A result goes to a file, or to `job.report`. The output of servers
    and workers and the progress appear at once. A worker computes with one thread, because OpenMP
    survives no fork: `threads=` sets another number for a process that has not computed before.

    Args:
        fn: The function.
        servers: Number of servers.
        workers: Number of workers.
        settings: Options of ps-run, such as policy="ssp", staleness=3, data_dir="job".

    Returns:
        The summary of ps-run: status, seconds, steps, samples, metrics, weights_sha256 and others.

    Raises:
        InvalidRequestError: A setting is not valid, or this process cannot be forked: it has used
            a GPU, or has been connected to servers.
        PSError: The run failed without an exception in the function.
        Exception: What the function of the first worker that failed raised. Its class is that of
            this process if its module has it here, otherwise RuntimeError.
        KeyboardInterrupt: The user interrupted the call. All processes have ended.
    """
    _check(fn)
    with tempfile.TemporaryDirectory(prefix="paramserver-") as name:
        folder = Path(name)
        defaults = {"threads": 1, "summary": folder / "summary.json"}
        chosen = {**defaults, **settings, "servers": servers, "workers": workers}
        parsed = _parse(_line(chosen, getattr(fn, "__name__", "function")))
        run = ForkedProcess(partial(_run, fn, parsed, folder / "error.json"))
        try:
            is_interrupted = _follow(run)
        finally:
            run.send_signal(signal.SIGTERM)  # after an error of a stream
        code = run.wait()
        if is_interrupted:
            raise KeyboardInterrupt
        if code:
            raise _failure(folder / "error.json", code)
        summary: dict[str, Any] = json.loads(Path(chosen["summary"]).read_text(encoding="utf-8"))
        return summary


def _check(fn: object) -> None:
    if not callable(fn):
        raise InvalidRequestError(f"fn={fn!r} is not valid. Try: a function without arguments")
    if sys.platform != "linux":
        raise InvalidRequestError(f"launch needs Linux, and this is {sys.platform}. Try: ps-run")
    torch = sys.modules.get("torch")
    used = "a GPU" if torch is not None and torch.cuda.is_initialized() else ""
    used = used or ("connections to servers" if is_used() else "")
    if used:
        raise InvalidRequestError(
            f"launch forks this process, which has used {used}: copies cannot use them. Try: "
            "restart the notebook or the script, and call launch first"
        )


def _line(settings: Mapping[str, Any], name: str) -> list[str]:
    """Return the arguments of ps-run; the name of the function stands for the script."""
    line = []
    for key, value in settings.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            line.append(flag)
        elif value is not None and value is not False:
            line += [flag, str(value)]
    return [*line, "--", name]


def _parse(line: list[str]) -> list[str]:
    """Return the line if ps-run accepts it.

    Raises:
        InvalidRequestError: It does not.
    """
    try:
        with cli.COMMAND.make_context("ps-run", list(line)) as ctx:
            settings = ctx.params
            cli.check(settings, None)
    except click.ClickException as error:
        problem = error.format_message().rstrip(".?")
        raise InvalidRequestError(
            f"a setting is not valid: {problem}. Try: the options of `ps-run --help`"
        ) from error
    if settings["group_size"] > 1:
        raise InvalidRequestError("group_size excludes launch. Try: `ps-run --group-size` SCRIPT")
    return line


def _run(fn: Callable[[], object], line: Sequence[str], error_file: Path) -> int:
    """Run ps-run in this process, with forked workers."""
    with cli.COMMAND.make_context("ps-run", list(line)) as ctx:
        count = ctx.params["workers"] + ctx.params["max_restarts"]
    workers = ForkedWorkers(partial(_work, fn, error_file), count)
    try:
        return run_command(cli.COMMAND, partial(cli.start, worker=(), workers=workers), line)
    finally:
        workers.end()


def _work(fn: Callable[[], object], error_file: Path) -> int:
    """Wait for the arguments of ps-worker, then run it with the function as its script."""
    line = sys.stdin.readline()
    if not line:
        return 0  # the run needs no further worker
    begin = json.loads(line)
    os.environ.clear()
    os.environ.update(begin["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = run_command(worker.COMMAND, partial(worker.start, function=fn), begin["arguments"])
    error = getattr(sys, "last_value", None)
    if code and error is not None:
        text = error.args[0] if len(error.args) == 1 and type(error.args[0]) is str else str(error)
        saved = {
            "module": type(error).__module__,
            "name": type(error).__qualname__,
            "message": text,
            "reason": getattr(error, "reason", None),
            "rank": os.environ.get("PS_WORKER_RANK"),
            "traceback": "".join(traceback.format_exception(error)),
        }
        with suppress(FileExistsError), error_file.open("x", encoding="utf-8") as file:
            json.dump(saved, file)
    return code


def _failure(error_file: Path, code: int) -> BaseException:
    """Return the exception of the first worker that failed, otherwise one for the exit code."""
    if not error_file.exists():
        kinds = (row.error for row in REASONS.values() if row.error.exit_code == code)
        return next(kinds, PSError)(
            f"the run ended with exit code {code}, see its output. Try: `ps-ctl explain {code}`"
        )
    saved = json.loads(error_file.read_text(encoding="utf-8"))
    message = saved["message"]
    kind = getattr(sys.modules.get(saved["module"]), saved["name"], None)
    error: BaseException
    if saved["reason"] in REASONS:
        error = error_for(saved["reason"], message)
    elif isinstance(kind, type) and issubclass(kind, Exception):
        error = kind.__new__(kind, message)  # its __init__ may need other arguments
    else:
        error = RuntimeError(f"{saved['name']}: {message}")
    error.add_note(f"In worker {saved['rank']}:\n{saved['traceback']}")
    return error


def _follow(run: "ForkedProcess") -> bool:
    """Show the output of the run until its end; return whether the user interrupted it."""
    is_interrupted = False
    with selectors.DefaultSelector() as selector:
        for pipe, stream in ((run.stdout, sys.stdout), (run.stderr, sys.stderr)):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            selector.register(pipe, selectors.EVENT_READ, (decoder, stream))
        while selector.get_map():
            try:
                for key, _ in selector.select():
                    decoder, stream = key.data
                    data = os.read(key.fd, READ_BYTES)
                    stream.write(decoder.decode(data, not data))
                    stream.flush()
                    if not data:
                        selector.unregister(key.fileobj)
            except KeyboardInterrupt:
                is_interrupted = True
                run.send_signal(signal.SIGINT)
    return is_interrupted


class ForkedWorkers:
    """Forked processes that wait for the arguments of a worker."""

    def __init__(self, body: Body, count: int) -> None:
        self._waiting = [ForkedProcess(body) for _ in range(count)]

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "ForkedProcess":
        """Turn a process into a worker with these arguments."""
        process = self._waiting.pop()
        begin = {"arguments": [*arguments], "environment": dict(environment)}
        with process.stdin as stdin:
            stdin.write(json.dumps(begin).encode() + b"\n")
        return process

    def end(self) -> None:
        """Kill the processes that are not workers."""
        for process in self._waiting:
            process.send_signal(signal.SIGKILL)
            process.wait()


class ForkedProcess:
    """A copy of this process that runs a function; its interface is that of subprocess.Popen.

    Its standard streams are pipes. It has a session of its own, and ends with this process.
    """

    def __init__(self, body: Body) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        pipes = [os.pipe() for _ in range(3)]
        inner = [pipes[0][0], pipes[1][1], pipes[2][1]]
        outer = [pipes[0][1], pipes[1][0], pipes[2][0]]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for end in outer:
                os.close(end)
            _become(body, inner, parent)
        for end in inner:
            os.close(end)
        self.stdin = os.fdopen(outer[0], "wb")
        self.stdout, self.stderr = (os.fdopen(end, "rb", 0) for end in outer[1:])

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self) -> int:
        """Return the exit code after the end of the process."""
        while (code := self.poll()) is None:
            with suppress(ChildProcessError):  # another thread was first
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


def _become(body: Body, streams: Sequence[int], parent: int) -> NoReturn:
    """Run the function in this new process, and end it without the parent's exit handlers."""
    code = 1
    try:
        os.setsid()
        end_with_parent(parent)
        for number, end in enumerate(streams):
            os.dup2(end, number)
            os.close(end)
        # they stay open when a copy of this process replaces them
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.excepthook = sys.__excepthook__
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # of the event loop of a notebook
        atexit._clear()
        atexit.register(close_all)
        code = body()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
