"""Entry points of the commands.

Until `raise_on_ctrl_c`, Ctrl-C ends the process at once with 130. A KeyboardInterrupt during an
import may be caught, converted or reported by a library.
"""

import os
import signal
from importlib import import_module
from types import FrameType

INTERRUPTED_EXIT_CODE = 130


def ps_server() -> int:
    """Run ps-server; return the exit code."""
    return _run("psserver.cli")


def ps_worker() -> int:
    """Run ps-worker; return the exit code."""
    return _run("psworker.cli")


def ps_run() -> int:
    """Run ps-run; return the exit code."""
    return _run("psworker.run.cli")


def ps_ctl() -> int:
    """Run ps-ctl; return the exit code."""
    return _run("psworker.ctl.cli")


def raise_on_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, so that cleanup code runs."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(module: str) -> int:
    _exit_on_ctrl_c()
    code: int = import_module(module).main()
    _exit_on_ctrl_c()  # an exit handler that is interrupted would show a traceback
    return code


def _exit_on_ctrl_c() -> None:
    """Let Ctrl-C end the process, unless it is ignored (nohup) or has another handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED_EXIT_CODE)
