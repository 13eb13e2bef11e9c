"""What ps-run starts: the command line and the environment of every process. Pure: nothing is
started here.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pscommon.settings import options
from pscommon.settings.command import Option
from pscommon.settings.values import host_and_port
from psworker.launch.script import TRACEBACK_FILE, Script
from psworker.session.environment import without_settings

HOST = "127.0.0.1"

# -P: the current folder is not ours to import from
SERVER = (sys.executable, "-P", "-m", "psserver")
SPARE = (sys.executable, "-P", "-m", "psserver.preload")
WORKER = (sys.executable, "-P", "-m", "psworker")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A cluster to be: how many processes, what they are told, and where they leave what they
    write.

    `settings` are the merged values of ps-run; `chosen` names those that somebody chose, which
    are passed on. `spare`: the command of a server that is told later which one it is to be.
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

    @property
    def servers(self) -> int:
        """How many."""
        return int(self.settings["servers"])

    @property
    def workers(self) -> int:
        """How many."""
        return int(self.settings["workers"])

    def port_file(self, name: str) -> Path:
        """Where server `name` writes its port."""
        return self.folder / f"{name}.port"

    def traceback_file(self, name: str) -> Path:
        """Where worker `name` writes what its script raised."""
        return self.folder / f"{name}.traceback"

    @property
    def not_saved_file(self) -> Path:
        """Where the servers write why the final weights are not on the disk."""
        return self.folder / "not-saved"

    def threads(self, name: str) -> int | None:
        """Threads of this process: what was asked for, else its share of the cores; None:
        OMP_NUM_THREADS decides.
        """
        if self.settings["threads"] is not None:
            return int(self.settings["threads"])
        if self.environ.get("OMP_NUM_THREADS"):
            return None
        return max(1, self.cores // (self.servers if is_server(name) else self.workers))

    def command(self, name: str, addresses: Mapping[str, str]) -> list[str]:
        """The command line of a process; `addresses` are those of the servers that are already
        bound.
        """
        own = self._server(name, addresses) if is_server(name) else self._worker(name, addresses)
        return own if is_server(name) else [*own, *self._script()]

    def server_arguments(self, name: str, addresses: Mapping[str, str]) -> list[str]:
        """What follows the command of a server, or is told to a spare one."""
        return self.command(name, addresses)[len(self.server) :]

    def environment(self, name: str, attempt: int) -> dict[str, str]:
        """Ours without our own settings, which travel as flags; and what is different for each
        process.

        attempt: how often it was started before.
        """
        result = without_settings(self.environ)
        result["PYTHONUNBUFFERED"] = "1"  # or prints would only show when a block of them is full
        threads = self.threads(name)
        if threads is not None:
            result["OMP_NUM_THREADS"] = str(threads)
        if is_server(
            name
        ):  # it runs nothing of the user's, and would say that it does not read PS_MINE
            result = {key: value for key, value in result.items() if not key.startswith("PS_")}
            result["PS_NOT_SAVED_FILE"] = str(self.not_saved_file)
        else:
            result["PS_WORKER_RANK"] = str(index_of(name))
            result["PS_WORKER_COUNT"] = str(self.workers)
            result["PS_WORKER_ATTEMPT"] = str(attempt)
            result[TRACEBACK_FILE] = str(self.traceback_file(name))
        return result

    def _server(self, name: str, addresses: Mapping[str, str]) -> list[str]:
        index = index_of(name)
        line = [*self.server, "--shard", f"{index}/{self.servers}"]
        # a server that is started again must be found where it was
        line += [
            "--bind",
            addresses.get(name, f"{HOST}:0"),
            "--port-file",
            str(self.port_file(name)),
        ]
        if index > 0:
            line += ["--join", addresses["s0"]]
        if "min_workers" not in self.chosen:
            line += ["--min-workers", str(self.workers)]
        return [*line, *self._flags(options.FORWARDED_TO_SERVERS), *self._common(name, index)]

    def _worker(self, name: str, addresses: Mapping[str, str]) -> list[str]:
        line = [*self.worker, "--ps", addresses["s0"]]
        return [
            *line,
            *self._flags(options.FORWARDED_TO_WORKERS),
            *self._common(name, self.servers + index_of(name)),
        ]

    def _script(self) -> list[str]:
        return [
            *(["-m"] if self.script.module else []),
            "--",
            self.script.target,
            *self.script.args,
        ]

    def _common(self, name: str, place: int) -> list[str]:
        """Flags of servers and workers alike; `place` counts all processes, for those that need
        a port each.
        """
        log_format = (
            "text" if self.settings["log_format"] == "auto" else self.settings["log_format"]
        )
        line = ["--log-level", str(self.settings["log_level"]), "--log-format", log_format]
        threads = self.threads(name)
        if threads is not None:
            line += ["--threads", str(threads)]
        if self.settings["metrics_bind"]:
            host, port = host_and_port(self.settings["metrics_bind"])
            line += ["--metrics-bind", f"{host}:{port + place if port else 0}"]
        return line

    def _flags(self, chosen: Sequence[Option]) -> list[str]:
        line: list[str] = []
        for option in chosen:
            if option.key in self.chosen:
                line += [option.flag, str(self.settings[option.key])]
        return line


def is_server(name: str) -> bool:
    """True for s0, s1, ...; False for w0, w1, ..."""
    return name.startswith("s")


def index_of(name: str) -> int:
    """3 for s3 and for w3."""
    return int(name[1:])
