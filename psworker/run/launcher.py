"""Launcher of ps-run: executes the actions of the supervisor with processes and a display."""

import queue
import subprocess
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from pscommon.settings.values import host_and_port
from pscommon.telemetry.logs import get_logger
from psworker.run import summary as report
from psworker.run.display import Display
from psworker.run.job_poller import Connect, JobPoller, JobResult, Status
from psworker.run.ray_engine import RayCluster
from psworker.supervision.decisions import (
    Action,
    CollectResult,
    FinishRun,
    KillProcess,
    RunOutcome,
    ShowMessage,
    StartProcess,
    StopJob,
    TerminateProcess,
    describe,
)
from psworker.supervision.plan import HOST, RunPlan, index_of, is_server
from psworker.supervision.processes import ManagedProcess, PreloadedServer, Process
from psworker.supervision.supervisor import Supervisor

Event = Callable[[float], list[Action]]
"""An event of the supervisor: called with the time, it returns the actions."""

TICK_SECONDS = 0.1
START_SECONDS, PRELOADED_START_SECONDS = 5.0, 1.0
"""Start time of a process, and of a preloaded server. The next server is preloaded only after
this time, so that it does not compete for the cores.
"""


log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """State after the end of a run.

    Attributes:
        seconds: duration of the run.
        box: box about the failure; empty without one.
        not_saved: why the final weights were not saved; empty if saved, None if unknown.
    """

    outcome: RunOutcome
    result: JobResult
    seconds: float
    restarts: int
    box: str
    not_saved: str | None = None


class Workers(Protocol):
    """Processes that wait for the arguments of ps-worker."""

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
        """Return a process that became a worker; its interface is that of Popen."""


class Launcher:
    """One run. Call run() from the main thread; signal handlers may call interrupt()."""

    def __init__(
        self,
        plan: RunPlan,
        logs: Path,
        connect: Connect,
        display: Display,
        workers: Workers | None = None,
        ray: RayCluster | None = None,
    ) -> None:
        """Make the launcher.

        logs: Folder for one log file per process.
        workers: Processes that become the workers; None: they are started by command.
        ray: Where processes run, if not on this machine.
        """
        self._plan = plan
        self._workers = workers
        self._ray = ray
        self._logs = logs
        self._display = display
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._poller = JobPoller(connect, self._handle_result, self._handle_stop)
        self._supervisor = Supervisor(
            plan.servers,
            plan.workers,
            max_restarts=plan.settings["max_restarts"],
            durable=plan.settings["data_dir"] is not None,
            grace=plan.settings["grace"],
            allow_idle=plan.settings["allow_idle"],
        )
        self._processes: dict[str, Process] = {}
        self._addresses: dict[str, str] = {}
        self._preloaded: PreloadedServer | None = None
        self._is_address_shown = self._has_begun_end = False
        self._page = ""  # URL of the live page
        self._killed: set[tuple[str, int]] = set()  # workers whose script hung
        self._wanted: int | None = None  # workers, as in the newest status
        self._has_status = False
        self._start_deadline = 0.0  # processes that start need the cores until then
        self._result = JobResult({})
        self._outcome: RunOutcome | None = None

    def interrupt(self, number: int) -> None:
        """Let the loop end the run because of this signal."""
        self._events.put(partial(self._supervisor.signalled, number))

    def run(self) -> RunEnd:
        """Run the cluster to its end; no process is left, even after an exception."""
        start = time.monotonic()
        try:
            self._execute(self._supervisor.start(start))
            while self._outcome is None:
                self._read_port_files()
                self._find_hung_workers()
                self._follow_wanted()
                self._show_page()
                event = self._next_event()
                self._execute(event(time.monotonic()))
                self._display.tick(self._poller.status, time.monotonic())
                self._preload_server(time.monotonic())
                if self._supervisor.is_ending:
                    self._display.stop_blocking()
                    self._begin_end()
        finally:
            self._end_all()
        return self._make_end(self._outcome, time.monotonic() - start)

    def _begin_end(self) -> None:
        """Resume stopped processes, and read the history while the servers answer; only once."""
        if not self._has_begun_end:
            self._has_begun_end = True
            for process in self._processes.values():
                process.resume()
            self._poller.read_history()

    def _next_event(self) -> Event:
        try:
            return self._events.get(timeout=TICK_SECONDS)
        except queue.Empty:
            return self._supervisor.tick

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartProcess(name, attempt):
                    self._start(name, attempt)
                case TerminateProcess(name):
                    if is_server(name):
                        self._poller.stop_polling()
                    self._processes[name].terminate()
                case KillProcess(name):
                    self._processes[name].kill()
                case CollectResult():
                    self._poller.collect()
                case StopJob():
                    self._poller.stop_job()
                case ShowMessage(text):
                    self._display.show_message(text)
                case FinishRun(outcome):
                    self._outcome = outcome

    def _start(self, name: str, attempt: int) -> None:
        log = self._logs / f"{name}.log"
        if attempt == 0:
            log.unlink(missing_ok=True)  # of an earlier run
        self._plan.port_file(name).unlink(missing_ok=True)
        page, environment = urlsplit(self._page).netloc, self._plan.environment(name, attempt)
        command = partial(self._plan.command, name, dict(self._addresses), page)
        spawned: Any = self._take_preloaded(name) if attempt else None
        if self._workers is not None and not is_server(name):
            spawned = self._workers.begin(command(), environment)
        seconds = START_SECONDS if spawned is None else PRELOADED_START_SECONDS
        self._start_deadline = max(self._start_deadline, time.monotonic() + seconds)
        if self._ray is not None:
            self._processes[name] = self._ray.start(
                name,
                command,
                environment,
                log,
                on_line=self._display.line,
                on_exit=self._handle_exit,
            )
            return
        self._processes[name] = ManagedProcess(
            name,
            command(),
            environment,
            log,
            traceback_file=self._plan.traceback_file(name),
            on_line=self._display.line,
            on_exit=self._handle_exit,
            on_prompt=partial(self._display.line, is_prompt=True)
            if self._plan.is_interactive(name)
            else None,
            spawned=spawned,
        )

    def _handle_exit(self, process: Process, code: int) -> None:
        if code and process.identity and not is_server(process.name):
            self._poller.report_exit(process.identity, f"its process {describe(code)}")
        name, successor = process.name, ""
        if is_server(name):
            successor = find_successor(self._poller.status, name, self._addresses.get(name, ""))
        self._events.put(partial(self._supervisor.exited, name, code, successor))

    def _preload_server(self, now: float) -> None:
        """Start a preloaded server for a possible restart, when no process is starting."""
        is_quiet = now >= self._start_deadline and self._supervisor.is_settled
        if (
            is_quiet
            and self._preloaded is None
            and self._supervisor.may_restart_servers
            and self._plan.spare
            and self._ray is None
        ):
            self._preloaded = PreloadedServer(self._plan.spare, self._plan.environment("s0", 0))

    def _take_preloaded(self, name: str) -> "subprocess.Popen[bytes] | None":
        """Return the preloaded process as server `name`, if there is one."""
        if not is_server(name) or self._preloaded is None:
            return None
        preloaded, self._preloaded = self._preloaded, None
        page = urlsplit(self._page).netloc
        return preloaded.begin(self._plan.server_arguments(name, self._addresses, page))

    def _read_port_files(self) -> None:
        for name in list(self._supervisor.unbound):
            address = read_address(self._plan.port_file(name))
            if address:
                self._addresses[name] = address
                self._plan.port_file(name).unlink()
                self._events.put(partial(self._supervisor.bound, name))
                if name == "s0":
                    self._poller.start(address)
                    self._show_address(address)

    def _show_address(self, address: str) -> None:
        if not self._is_address_shown:
            self._is_address_shown = True
            self._display.show_message(f"inspect this job with: ps-ctl --ps {address} status")

    def _show_page(self) -> None:
        """Show the address of the live page, which a restarted server keeps."""
        page = str(self._poller.status.get("page") or "")
        if page and not self._page:
            self._page = page
            self._display.show_message(f"live page: {page}")
            if self._plan.settings["open"]:
                open_in_browser(page)

    def _find_hung_workers(self) -> None:
        hung = hung_processes(self._poller.status) - self._killed
        for name, process in self._processes.items():
            if (process.host, process.pid) in hung and not is_server(name):
                self._killed.add((process.host, process.pid))
                self._events.put(partial(self._supervisor.hung, name))

    def _follow_wanted(self) -> None:
        """Report a change of the number of workers that the job wants.

        The first status may have the number of an earlier run; `--workers` wins.
        """
        status = self._poller.status
        if not status or (wanted := status.get("workers_wanted")) == self._wanted:
            self._has_status = self._has_status or bool(status)
            return
        if self._has_status and wanted is not None:
            processes = {
                name: (process.host, process.pid) for name, process in self._processes.items()
            }
            leaving = find_leaving(status, processes)
            self._events.put(partial(self._supervisor.wanted, wanted, leaving))
        self._wanted, self._has_status = wanted, True

    def _handle_result(self, result: JobResult) -> None:
        self._result = result
        self._events.put(partial(self._supervisor.collected, result.undone, result.idle))

    def _handle_stop(self, problem: str) -> None:
        self._events.put(partial(self._supervisor.stop_answered, problem))

    def _end_all(self) -> None:
        self._display.stop_blocking()
        if self._preloaded is not None:
            self._preloaded.end()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._poller.close()

    def _make_end(self, outcome: RunOutcome, seconds: float) -> RunEnd:
        result = self._result
        if not result.status:
            poller = self._poller
            result = JobResult(
                poller.status, None, result.problem, resumed=poller.resumed, history=poller.history
            )
        culprit = self._processes.get(outcome.culprit)
        tail, traceback = (list(culprit.tail), culprit.traceback) if culprit else ([], [])
        log = culprit.log if culprit else self._logs
        box = report.box(outcome, log, tail, traceback) if outcome.status == "failed" else ""
        return RunEnd(
            outcome, result, seconds, self._supervisor.restarts, box, self._read_not_saved()
        )

    def _read_not_saved(self) -> str | None:
        """Return the report of shard 0; None if it was killed before it wrote one."""
        path = self._plan.not_saved_file
        return path.read_text(encoding="utf-8") if path.exists() else None


def find_successor(status: Status, name: str, own: str) -> str:
    """Return the address of the server that replaced server `name` at `own`; "" without one."""
    for row in status.get("servers", ()):
        if row["shard"] == index_of(name) and row["connected"] and own not in ("", row["address"]):
            return str(row["address"])
    return ""


def open_in_browser(page: str) -> None:
    """Open a page in the user's browser, in a thread: a browser in a terminal ends with it."""

    def try_to_open() -> None:
        if not webbrowser.open(page):
            log.warning("browser_not_opened", page=page)

    threading.Thread(target=try_to_open, name="browser", daemon=True).start()


def hung_processes(status: Status) -> set[tuple[str, int]]:
    """Return host and pid of workers that were dropped because their script hung."""
    newest = {
        (row["host"], row["pid"]): row
        for row in sorted(status.get("workers", ()), key=lambda row: int(row["worker"]))
    }
    return {process for process, row in newest.items() if row.get("hung")}


def find_leaving(status: Status, processes: Mapping[str, tuple[str, int]]) -> set[str]:
    """Return the workers that the servers have asked to leave.

    processes: Host and pid by name. A row is that of a process by them, and by its rank while it
        is a member: of a group of processes the launcher knows another pid.
    """
    rows = [row for row in status.get("workers", ()) if row.get("draining")]
    leaving = {(row["host"], row["pid"]) for row in rows}
    ranks = {row["rank"] for row in rows if row["state"] in ("joined", "active", "idle")}
    return {
        name
        for name, process in processes.items()
        if not is_server(name) and (process in leaving or index_of(name) in ranks)
    }


def read_address(path: Path) -> str:
    """Return HOST:PORT from a port file; "" while it is missing or incomplete.

    The file contains HOST:PORT or a port of the default host.
    """
    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if text.isdigit():
        return f"{HOST}:{text}"
    return text if ":" in text and host_and_port(text)[1] else ""
