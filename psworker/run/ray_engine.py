"""Processes of a run on a Ray cluster: one actor for each, in one placement group.

`ray_node` has the actor. A thread of the driver asks it for the lines of its process.

s0 is on the node of ps-run, whose loss ends the run: the other processes know no other address.
When another node is lost, its processes end as if by SIGKILL, and the supervisor starts them again.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pscommon.core.errors import InvalidRequestError, TooFewWorkersError
from pscommon.core.exit_codes import ExitCode
from pscommon.settings.values import host_and_port
from psworker.run.ray_node import POLL_SECONDS, Event, NodeProcess
from psworker.supervision.plan import RunPlan, is_server
from psworker.supervision.processes import (
    TAIL_LINES,
    LogFile,
    OnExit,
    OnLine,
    Process,
)

NOTICE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
CREDENTIALS = ("tls_ca", "tls_cert", "tls_key", "token_file")


def import_ray() -> Any:
    """Return the module; raise InvalidRequestError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise InvalidRequestError(
            "`--on ray` needs the package ray. Try: `pip install 'paramserver[ray]'`"
        ) from None
    return ray


class RayProcess:
    """A process on a node, followed by a thread of the driver; see `Process`."""

    def __init__(
        self,
        name: str,
        create: Callable[[], Any],
        start: Callable[[str], Mapping[str, Any]],
        log: Path,
        *,
        folder: Path,
        on_line: OnLine,
        on_exit: OnExit,
    ) -> None:
        """Start the process.

        Args:
            name: Its name.
            create: Creates its actor.
            start: Returns the argument of `NodeProcess.start` for the address of a node.
            log: Its log file.
            folder: Folder for the files that the process writes.
            on_line: Called for each line.
            on_exit: Called last.
        """
        self.name = name
        self.log = log
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.traceback: list[str] = []
        self.pid, self.identity, self.host = 0, "", ""
        self._code_unplaced = -int(signal.SIGKILL)
        self._start, self._folder = start, folder
        self._on_line, self._on_exit = on_line, on_exit
        self._log = LogFile(log, lambda problem: self._emit("stderr", problem))
        self._actor = create()
        self._thread = threading.Thread(target=self._follow, name=f"follow-{name}", daemon=True)
        self._thread.start()

    def terminate(self) -> None:
        self._actor.send.remote("terminate")

    def resume(self) -> None:
        self._actor.send.remote("resume")

    def kill(self) -> None:
        if self.pid:
            self._actor.send.remote("kill")
        else:  # it may never be placed
            import ray

            ray.kill(self._actor)

    def give_up(self) -> None:
        """End the process, which has not started, with exit code 0: its work is done."""
        self._code_unplaced = 0
        self.kill()

    def join(self) -> None:
        self._thread.join()

    def _follow(self) -> None:
        """Copy what happens on the node; a lost node is an end by SIGKILL."""
        import ray

        code: int | None = None
        try:
            place = self._actor.host.remote()
            if not ray.wait([place], timeout=NOTICE_SECONDS)[0]:
                self._emit("stderr", "waiting for a node of Ray with free resources")
            host = ray.get(place)
            started = ray.get(self._actor.start.remote(self._start(host)))
            self.pid, self.identity, self.host = started
            code = self._read(ray, host)
        except Exception as error:  # Ray has many classes
            if "failed to import" in str(error) or "No module named" in str(error):
                code = int(ExitCode.USAGE)
                self._emit(
                    "stderr", "paramserver is not installed on a node. Try: install it there"
                )
            elif self.pid:
                self._emit("stderr", f"lost with its node: {str(error).splitlines()[0]}")
        finally:
            with suppress(Exception):
                ray.kill(self._actor)
            self._on_exit(self, self._code_unplaced if code is None else code)

    def _read(self, ray: Any, host: str) -> int:
        """Handle the events of the process to its end; return its exit code."""
        received = 0
        while True:
            try:
                events = ray.get(self._actor.poll.remote(received))
            except ray.exceptions.ActorUnavailableError:  # Ray decides whether its node is lost
                received = 0
                time.sleep(POLL_SECONDS)
                continue
            received = len(events)
            if (code := self._handle(events, host)) is not None:
                return code

    def _handle(self, events: Sequence[Event], host: str) -> int | None:
        """Handle events; return the exit code, if the process has ended."""
        for kind, first, second in events:
            if kind == "line":
                self._emit(first, second)
            elif kind == "file":
                is_port = first.endswith(".port") and second.strip().isdigit()
                text = f"{host}:{second.strip()}" if is_port else second
                # atomic: the launcher reads it at any time
                (self._folder / f"{first}.new").write_text(text, encoding="utf-8")
                (self._folder / f"{first}.new").replace(self._folder / first)
            else:
                self.traceback = second
                self._log.write("".join(f"{line}\n" for line in second).encode())
                return int(first)
        return None

    def _emit(self, stream: Any, line: str) -> None:
        self.tail.append(line)
        self._log.write(f"{line}\n".encode())
        self._on_line(self.name, stream, line)


class RayCluster:
    """The placement group of a run, and its processes."""

    def __init__(self, plan: RunPlan) -> None:
        """Connect to the cluster and reserve the resources; call this from the main thread.

        Raises:
            InvalidRequestError: Ray is not installed, or no cluster runs.
            TooFewWorkersError: The cluster lacks the resources.
        """
        self._plan = plan
        self._ray = ray = import_ray()
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            if ":" in address:  # Ray itself would retry for minutes
                socket.create_connection(host_and_port(address), CONNECT_SECONDS).close()
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError):
            raise InvalidRequestError(
                f"`--on ray` found no Ray cluster (RAY_ADDRESS={address}). Try: "
                "`ray start --head` here, `ray start --address HOST:PORT` on the other machines"
            ) from None
        self._marker = _write_marker(plan)
        self._files = {path.name: path.read_bytes() for path in copy_credentials(plan)}
        self._processes: dict[str, RayProcess] = {}
        self._bundles = self._resources()
        self._group = self._reserve()

    def _resources(self) -> dict[str, dict[str, float]]:
        """Return what each process needs apart from s0, which takes nothing from Ray."""
        servers = [f"s{index}" for index in range(1, self._plan.servers)]
        workers = [f"w{index}" for index in range(self._plan.workers)]
        return {
            **{name: {"CPU": 1.0} for name in servers},
            **{name: dict(self._plan.settings["worker_resources"]) for name in workers},
        }

    def _reserve(self) -> Any:
        from ray.util.placement_group import placement_group

        group = placement_group(list(self._bundles.values()), strategy="SPREAD")
        seconds = self._plan.settings["connect_timeout"]
        if not group.wait(seconds):
            needed = _total(self._bundles.values())
            here = {name: self._ray.available_resources().get(name, 0.0) for name in needed}
            self.close()
            raise TooFewWorkersError(
                f"after {seconds:g} s Ray has too few free resources: {_text(needed)} are needed, "
                f"{_text(here)} are free. Try: add nodes, or fewer `--workers` or `--servers`"
            )
        return group

    def start(
        self,
        name: str,
        command: Callable[[str], Sequence[str]],
        environment: Mapping[str, str],
        log: Path,
        *,
        on_line: OnLine,
        on_exit: OnExit,
    ) -> RayProcess:
        """Start a process; `command` returns its command line on the node with this address."""
        plan = self._plan
        fixed = {
            "name": name,
            "environment": environment,
            "forced": [
                key for key in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED") if key in environment
            ],
            "folder": str(plan.folder),
            "python": sys.executable,
            "files": self._files,
            "cwd": os.getcwd(),
            "marker": self._marker if is_server(name) else None,
            "port_file": plan.port_file(name).name if is_server(name) else None,
            "traceback_file": plan.traceback_file(name).name,
        }
        process = self._processes[name] = RayProcess(
            name,
            partial(self._create, name),
            lambda host: {**fixed, "command": list(command(host))},
            log,
            folder=plan.folder,
            on_line=on_line,
            on_exit=partial(self._handle_exit, on_exit),
        )
        return process

    def _handle_exit(self, on_exit: OnExit, process: Process, code: int) -> None:
        """Do not wait for workers that Ray cannot place again, once all others are done."""
        del self._processes[process.name]
        on_exit(process, code)
        workers = [each for each in self._processes.values() if not is_server(each.name)]
        if code == 0 and not any(worker.pid for worker in workers):
            for worker in workers:
                worker.give_up()

    def _create(self, name: str) -> Any:
        """Create the actor. Workers beyond the first ones run where resources are free."""
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        strategy: Any = "SPREAD"
        needed: dict[str, float] = {}
        if name == "s0":
            own = self._ray.get_runtime_context().get_node_id()
            strategy = NodeAffinitySchedulingStrategy(own, soft=False)
        elif name in self._bundles:
            index = list(self._bundles).index(name)
            strategy = PlacementGroupSchedulingStrategy(self._group, index)
            needed |= self._bundles[name]
        else:
            needed |= self._plan.settings["worker_resources"]
        return (
            self._ray.remote(NodeProcess)
            .options(
                num_cpus=needed.pop("CPU", 0.0),
                num_gpus=needed.pop("GPU", 0.0),
                resources=needed,
                scheduling_strategy=strategy,
            )
            .remote()
        )

    def close(self) -> None:
        """Release the resources."""
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
        self._ray.shutdown()


def copy_credentials(plan: RunPlan) -> list[Path]:
    """Return the files of credentials, which are in the folder of the run."""
    return [plan.settings[key] for key in CREDENTIALS if plan.settings[key] is not None]


def _write_marker(plan: RunPlan) -> Path | None:
    """Write a file by which a node recognizes the data directory."""
    folder: Path | None = plan.settings["data_dir"]
    if folder is None or plan.servers == 1:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder.resolve() / f".{plan.folder.name}"
    marker.touch()
    return marker


def _total(bundles: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, number in bundle.items():
            total[name] = total.get(name, 0.0) + number
    return total


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in resources.items())
