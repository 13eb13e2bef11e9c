"""Command line and environment of every process of ps-run; starts nothing."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pscommon.settings import options
from pscommon.settings.command import Option
from pscommon.settings.environment import without_settings
from pscommon.settings.values import host_and_port
from psworker.supervision.script import TRACEBACK_FILE, Script

HOST = "127.0.0.1"

# -P: do not import modules from the current folder
SERVER = (sys.executable, "-P", "-m", "psserver")
SPARE = (sys.executable, "-P", "-m", "psserver.preload")
WORKER = (sys.executable, "-P", "-m", "psworker")
GROUP = (sys.executable, "-P", "-m", "psworker.supervision.group")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Plan of a cluster on this machine.

    Attributes:
        settings: merged settings of ps-run.
        chosen: keys of settings that are not defaults; these are forwarded.
        folder: folder for temporary files of the run.
        server, worker: their commands.
        spare: command of a preloaded server, which reads its arguments later.
        environ: environment of ps-run.
        has_terminal: whether ps-run reads from a terminal and writes to one.
    """

    script: Script
    settings: Mapping[str, Any]
    chosen: frozenset[str]
    cores: int
    folder: Path
    server: Sequence[str] = SERVER
    worker: Sequence[str] = WORKER
    spare: Sequence[str] = SPARE
    environ: Mapping[str, str] = field(default_factory=dict)
    has_terminal: bool = False

    @property
    def servers(self) -> int:
        return int(self.settings["servers"])

    @property
    def workers(self) -> int:
        return int(self.settings["workers"])

    @property
    def group_size(self) -> int:
        return int(self.settings["group_size"])

    def is_interactive(self, name: str) -> bool:
        """Return whether the process may read from the terminal: the only worker."""
        return self.has_terminal and not is_server(name) and self.workers == self.group_size == 1

    def port_file(self, name: str) -> Path:
        """Return the file for the port of server `name`."""
        return self.folder / f"{name}.port"

    def traceback_file(self, name: str) -> Path:
        """Return the file for the traceback of worker `name`."""
        return self.folder / f"{name}.traceback"

    @property
    def not_saved_file(self) -> Path:
        """Return the file in which shard 0 reports why the final weights were not saved."""
        return self.folder / "not-saved"

    def threads(self, name: str) -> int | None:
        """Return the threads of a process: --threads, or its share of the cores.

        None means that OMP_NUM_THREADS is set and decides.
        """
        if self.settings["threads"] is not None:
            return int(self.settings["threads"])
        if self.environ.get("OMP_NUM_THREADS"):
            return None
        if self.settings["on"] == "ray":
            return max(1, int(self.resources(name).get("CPU", 1)))
        processes = self.servers if is_server(name) else self.workers * self.group_size
        return max(1, self.cores // processes)

    def resources(self, name: str) -> Mapping[str, float]:
        """Return what a process needs of a node on Ray."""
        return {"CPU": 1.0} if is_server(name) else self.settings["worker_resources"]

    def command(
        self, name: str, addresses: Mapping[str, str], page: str = "", host: str = HOST
    ) -> list[str]:
        """Return the command line of a process.

        Args:
            name: Its name.
            addresses: Those of the bound servers.
            page: Address of the live page, once s0 has one.
            host: Address of its machine.
        """
        if is_server(name):
            return [*self.server, *self.server_arguments(name, addresses, page, host)]
        size = self.group_size
        return [
            *([*GROUP, str(size)] if size > 1 else []),
            *self.worker,
            *(["--group"] if size > 1 else []),
            "--ps",
            addresses["s0"],
            *self._flags(options.FORWARDED_TO_WORKERS),
            *self._common(name, self.servers + index_of(name)),
            *(["-m"] if self.script.module else []),
            "--",
            self.script.target,
            *self.script.args,
        ]

    def server_arguments(
        self, name: str, addresses: Mapping[str, str], page: str = "", host: str = HOST
    ) -> list[str]:
        """Return the arguments of a server, without its command."""
        index = index_of(name)
        # a restarted server binds its old address, unless it has moved
        bind = addresses.get(name, "")
        if not bind or host_and_port(bind)[0] != host:
            bind = f"{host}:0"
        line = ["--shard", f"{index}/{self.servers}", "--bind", bind]
        line += ["--port-file", str(self.port_file(name))]
        if index > 0:
            line += ["--join", addresses["s0"]]
        if index == 0 and self.settings["metrics_bind"] is None:
            line += ["--metrics-bind", page or f"{HOST}:0"]
        if "min_workers" not in self.chosen:
            line += ["--min-workers", str(self.workers)]
        return [*line, *self._flags(options.FORWARDED_TO_SERVERS), *self._common(name, index)]

    def environment(self, name: str, attempt: int) -> dict[str, str]:
        """Return the environment of a process: settings are removed, they are flags.

        attempt: number of earlier starts.
        """
        result = without_settings(self.environ)
        result["PYTHONUNBUFFERED"] = "1"  # show each print at once
        threads = self.threads(name)
        if threads is not None:
            result["OMP_NUM_THREADS"] = str(threads)
        if is_server(name):  # a server would warn about the user's own PS_ variables
            result = {key: value for key, value in result.items() if not key.startswith("PS_")}
            result["PS_NOT_SAVED_FILE"] = str(self.not_saved_file)
        else:
            result["PS_WORKER_RANK"] = str(index_of(name))
            result["PS_WORKER_COUNT"] = str(self.workers)
            result["PS_WORKER_ATTEMPT"] = str(attempt)
            result[TRACEBACK_FILE] = str(self.traceback_file(name))
        return result

    def _common(self, name: str, number: int) -> list[str]:
        """Return flags of all processes; `number` counts them, for one metrics port each."""
        log_format = (
            "text" if self.settings["log_format"] == "auto" else self.settings["log_format"]
        )
        line = ["--log-level", str(self.settings["log_level"]), "--log-format", log_format]
        threads = self.threads(name)
        if threads is not None:
            line += ["--threads", str(threads)]
        if self.settings["metrics_bind"]:
            host, port = host_and_port(self.settings["metrics_bind"])
            line += ["--metrics-bind", f"{host}:{port + number if port else 0}"]
        return line

    def _flags(self, chosen: Sequence[Option]) -> list[str]:
        line: list[str] = []
        for option in chosen:
            value = self.settings[option.key]
            if option.key in self.chosen and value is not False:
                line += [option.flag] if value is True else [option.flag, str(value)]
        return line


def is_server(name: str) -> bool:
    """Return True for s0, s1, ..., False for w0, w1, ..."""
    return name.startswith("s")


def index_of(name: str) -> int:
    """Return the number in a name: 3 for s3 and for w3."""
    return int(name[1:])
