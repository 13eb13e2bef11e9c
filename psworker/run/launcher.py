"""ps-run's shell: carries out what the supervisor decides, with real processes, servers and a
terminal.
"""

import queue
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from pscommon.settings.values import host_and_port
from psworker.launch.events import (
    Action,
    CollectResult,
    Event,
    FinishRun,
    KillProcess,
    ProcessExited,
    ResultCollected,
    ServerBound,
    ShowMessage,
    StartProcess,
    StopAnswered,
    StopJob,
    TerminateProcess,
    Tick,
    WorkerHung,
)
from psworker.launch.outcome import RunOutcome, describe
from psworker.launch.plan import HOST, RunPlan, index_of, is_server
from psworker.launch.preload import PreloadedServer
from psworker.launch.processes import ManagedProcess
from psworker.launch.supervisor import Supervisor
from psworker.run import summary as report
from psworker.run.display import Display
from psworker.run.job_poller import Connect, JobPoller, JobResult, Status

TICK_SECONDS = 0.1
START_SECONDS, SPARE_START_SECONDS = 5.0, 1.0
"""After the start of a process, and of a server that was the spare one: the next spare takes
nobody's time any more.
"""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """All that is known when nothing runs any more. not_saved: why the final weights are not on
    the disk, in words; empty where they are, None where that is not known."""

    outcome: RunOutcome
    result: JobResult
    seconds: float
    restarts: int
    log: Path | None
    box: str
    not_saved: str | None = None


class Launcher:
    """One run. Call run() from the main thread; `post` takes events, from signal handlers too."""

    def __init__(self, plan: RunPlan, logs: Path, connect: Connect, display: Display) -> None:
        """`logs`: the folder for a log file of each process; `plan.folder` is for what only this
        run needs.
        """
        self._plan = plan
        self._logs = logs
        self._display = display
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._watch = JobPoller(
            connect, self._take_result, lambda problem: self.post(StopAnswered(problem))
        )
        self._supervisor = Supervisor(
            plan.servers,
            plan.workers,
            max_restarts=plan.settings["max_restarts"],
            durable=plan.settings["data_dir"] is not None,
            grace=plan.settings["grace"],
            allow_idle=plan.settings["allow_idle"],
        )
        self._processes: dict[str, ManagedProcess] = {}
        self._addresses: dict[str, str] = {}
        self._spare: PreloadedServer | None = None
        self._address_shown = self._ends = False
        self._killed: set[int] = set()  # pids of workers whose script hung
        self._starting = 0.0  # until then somebody starts, and needs the processors
        self._result = JobResult({})
        self._outcome: RunOutcome | None = None

    def post(self, event: Event) -> None:
        """Hands an event to the loop."""
        self._events.put(event)

    def run(self) -> RunEnd:
        """Runs the cluster to its end. Whatever happens, no process is left."""
        began = time.monotonic()
        try:
            self._carry_out(self._supervisor.start(began))
            while self._outcome is None:
                self._look_for_ports()
                self._look_for_hung()
                self._carry_out(self._supervisor.step(self._next_event(), time.monotonic()))
                self._display.tick(self._watch.status, time.monotonic())
                self._prepare(time.monotonic())
                if self._supervisor.is_ending:
                    self._display.hurry()
                    self._begin_end()
        finally:
            self._end_all()
        return self._ended(self._outcome, time.monotonic() - began)

    def _begin_end(self) -> None:
        """Once: continue processes that were stopped, and read the history while the servers
        still answer.
        """
        if not self._ends:
            self._ends = True
            for process in self._processes.values():
                process.resume()
            self._watch.read_history()

    def _next_event(self) -> Event:
        try:
            return self._events.get(timeout=TICK_SECONDS)
        except queue.Empty:
            return Tick()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartProcess(name, attempt):
                    self._start(name, attempt)
                case TerminateProcess(name):
                    if is_server(name):
                        self._watch.rest()
                    self._processes[name].terminate()
                case KillProcess(name):
                    self._processes[name].kill()
                case CollectResult():
                    self._watch.collect()
                case StopJob():
                    self._watch.stop_job()
                case ShowMessage(text):
                    self._display.say(text)
                case FinishRun(outcome):
                    self._outcome = outcome

    def _start(self, name: str, attempt: int) -> None:
        log = self._logs / f"{name}.log"
        if attempt == 0:
            log.unlink(missing_ok=True)  # of an earlier run
        self._plan.port_file(name).unlink(missing_ok=True)
        spawned = self._spawned(name) if attempt else None
        takes = START_SECONDS if spawned is None else SPARE_START_SECONDS
        self._starting = max(self._starting, time.monotonic() + takes)
        self._processes[name] = ManagedProcess(
            name,
            self._plan.command(name, self._addresses),
            self._plan.environment(name, attempt),
            log,
            traceback_file=self._plan.traceback_file(name),
            on_line=self._display.line,
            on_exit=self._take_exit,
            spawned=spawned,
        )

    def _take_exit(self, process: ManagedProcess, code: int) -> None:
        if code and process.identity and not is_server(process.name):
            self._watch.report_exit(process.identity, f"its process {describe(code)}")
        self.post(ProcessExited(process.name, code, self._successor(process.name)))

    def _successor(self, name: str) -> str:
        return (
            successor(self._watch.status, name, self._addresses.get(name, ""))
            if is_server(name)
            else ""
        )

    def _prepare(self, now: float) -> None:
        """A spare server, if one may have to be started again, and once it is quiet."""
        quiet = now >= self._starting and self._supervisor.is_settled
        if (
            quiet
            and self._spare is None
            and self._supervisor.may_restart_servers
            and self._plan.spare
        ):
            self._spare = PreloadedServer(self._plan.spare, self._plan.environment("s0", 0))

    def _spawned(self, name: str) -> "subprocess.Popen[bytes] | None":
        """The spare process, where it can be this one."""
        if not is_server(name) or self._spare is None:
            return None
        spare, self._spare = self._spare, None
        return spare.begin(self._plan.server_arguments(name, self._addresses))

    def _look_for_ports(self) -> None:
        for name in list(self._supervisor.unbound):
            address = read_address(self._plan.port_file(name))
            if address:
                self._addresses[name] = address
                self._plan.port_file(name).unlink()
                self.post(ServerBound(name))
                if name == "s0":
                    self._watch.start(address)
                    self._show_address(address)

    def _show_address(self, address: str) -> None:
        if not self._address_shown:
            self._address_shown = True
            self._display.say(f"to look at this job: ps-ctl --ps {address} status")

    def _look_for_hung(self) -> None:
        pids = hung(self._watch.status, socket.gethostname()) - self._killed
        for name, process in self._processes.items():
            if process.pid in pids and not is_server(name):
                self._killed.add(process.pid)
                self.post(WorkerHung(name))

    def _take_result(self, result: JobResult) -> None:
        self._result = result
        self.post(ResultCollected(result.undone, result.idle))

    def _end_all(self) -> None:
        self._display.hurry()
        if self._spare is not None:
            self._spare.end()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._watch.close()

    def _ended(self, outcome: RunOutcome, seconds: float) -> RunEnd:
        result = self._result
        if not result.status:
            watch = self._watch
            result = JobResult(
                watch.status, None, result.problem, resumed=watch.resumed, history=watch.history
            )
        culprit = self._processes.get(outcome.culprit)
        tail, traceback = (list(culprit.tail), culprit.traceback) if culprit else ([], [])
        log = culprit.log if culprit else self._logs
        box = report.box(outcome, log, tail, traceback) if outcome.status == "failed" else ""
        return RunEnd(
            outcome, result, seconds, self._supervisor.restarts, log, box, self._not_saved()
        )

    def _not_saved(self) -> str | None:
        """As shard 0 says; one that was killed says nothing."""
        path = self._plan.not_saved_file
        return path.read_text(encoding="utf-8") if path.exists() else None


def successor(status: Status, name: str, own: str) -> str:
    """Where shard 0 has found a server in the place of this one of ours, which was at `own`; "":
    nowhere else.
    """
    for row in status.get("servers", ()):
        if row["shard"] == index_of(name) and row["connected"] and own not in ("", row["address"]):
            return str(row["address"])
    return ""


def hung(status: Status, host: str) -> set[int]:
    """Pids of workers on this host that have lost their place because their script makes no
    call, and have no other.
    """
    newest = {
        row["pid"]: row
        for row in sorted(status.get("workers", ()), key=lambda row: int(row["worker"]))
    }
    return {pid for pid, row in newest.items() if row.get("hung") and row["host"] == host}


def read_address(path: Path) -> str:
    """HOST:PORT from a port file, which holds that or the port alone; "" while it is not there
    or not yet whole.
    """
    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if text.isdigit():
        return f"{HOST}:{text}"
    return text if ":" in text and host_and_port(text)[1] else ""
