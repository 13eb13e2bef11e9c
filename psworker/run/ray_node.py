"""The actor of a process on Ray, which starts it on a node as ps-run does on its own machine.

It gives the process a temporary folder, because nodes share no files: credentials are copied into
it, and the driver gets what the process writes there.
"""

import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pscommon.core.exit_codes import ExitCode
from psworker.run.folders import make_folder
from psworker.supervision.processes import ManagedProcess, Process

POLL_SECONDS = 0.5
"""An actor answers at once when its process writes a line; a signal waits for the answer."""

Event = tuple[str, Any, Any]
"""("line", stream, text), ("file", name, content) or ("exit", code, traceback)."""


class NodeProcess:
    """Actor that runs one process on its node. Ray runs its methods in the main thread, in turn."""

    def __init__(self) -> None:
        self._process: ManagedProcess | None = None
        self._folder = Path()
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._expected: Path | None = None
        self._is_cancelled = False

    def host(self) -> str:
        """Return the address of this node."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start(self, start: Mapping[str, Any]) -> tuple[int, str, str]:
        """Start the process; return its pid, its identity, and the name of the host.

        start: See `RayProcess`.
        """
        marker = start["marker"]
        if self._is_cancelled or (marker is not None and not marker.exists()):
            self._refuse(marker)
            return 0, "", ""
        self._folder = folder = make_folder("ps-run-")
        for name, content in start["files"].items():
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
        here = {start["folder"]: str(folder), start["python"]: sys.executable}
        if Path(start["cwd"]).is_dir():
            os.chdir(start["cwd"])
        names = [name for name in start["environment"] if name.startswith("PS_")]
        of_run = {name: start["environment"][name] for name in (*names, *start["forced"])}
        environment = {**start["environment"], **os.environ, **of_run}
        self._expected = start["port_file"] and folder / start["port_file"]
        self._process = process = ManagedProcess(
            start["name"],
            [_replace(word, here) for word in start["command"]],
            {name: _replace(value, here) for name, value in environment.items()},
            Path(os.devnull),
            traceback_file=folder / start["traceback_file"],
            on_line=lambda _, stream, text: self._add(("line", stream, text)),
            on_exit=self._handle_exit,
        )
        return process.pid, process.identity, socket.gethostname()

    def poll(self, received: int) -> list[Event]:
        """Return the newest events; wait for one at most POLL_SECONDS, less before a port is bound.

        received: number of events that the last answer had; 0 if it was lost.
        """
        with self._changed:
            del self._events[:received]
            seconds = POLL_SECONDS / 5 if self._expected else POLL_SECONDS
            self._changed.wait_for(lambda: self._events, seconds)
            if self._expected and self._expected.exists():
                self._events.append(("file", self._expected.name, self._expected.read_text()))
                self._expected = None
            return list(self._events)

    def send(self, method: str) -> None:
        """Call a method of the process: terminate, resume or kill."""
        if self._process is not None:
            getattr(self._process, method)()
        elif method != "resume":
            self._is_cancelled = True

    def _refuse(self, marker: Path | None) -> None:
        if self._is_cancelled:
            self._add(("exit", -signal.SIGTERM, []))
            return
        assert marker is not None
        text = (
            f"`--data-dir {marker.parent}` is not on a file system that node "
            f"{socket.gethostname()} shares: a server that moves would lose its data. "
            "Try: a directory on a shared file system"
        )
        self._add(("line", "stderr", text))
        self._add(("exit", int(ExitCode.USAGE), []))

    def _handle_exit(self, process: Process, code: int) -> None:
        for path in self._folder.iterdir():
            if path.name == "not-saved":
                self._add(("file", path.name, path.read_text()))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._add(("exit", code, process.traceback))

    def _add(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()


def _replace(text: str, names: Mapping[str, str]) -> str:
    for there, here in names.items():
        text = text.replace(there, here)
    return text
