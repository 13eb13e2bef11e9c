"""A Slurm cluster of two nodes on this host, and its jobs."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path
from socket import gethostname

from tests.support.ports import free_port, free_ports
from tests.support.programs import BIN
from tests.support.workers import until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
NODES = ("n1", "n2")
SECONDS = 300.0
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")

CONFIGURATION = """\
ClusterName=paramserver
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=10
SlurmdTimeout=6
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[1]} CPUs=4 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.3 Port={ports[2]} CPUs=4 RealMemory=2000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The cluster; jobs are submitted from `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PS_")
        } | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }

    def call(self, *command: str, **environment: str) -> str:
        """Run a command of Slurm and return its output."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment | environment,
            text=True,
            capture_output=True,
            check=True,
            timeout=SECONDS,
        ).stdout.strip()

    def start(self) -> None:
        """Start the daemons; they go to the background themselves."""
        munge = self.folder / "munge"
        munge.mkdir()
        munge.chmod(0o755)  # as munged requires
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "state").mkdir(0o700)
        text = CONFIGURATION.format(
            host=gethostname(), user=getuser(), folder=self.folder, ports=free_ports(3)
        )
        (self.folder / "slurm.conf").write_text(text)
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self.call("munged", "--force", f"--socket={munge / 'socket'}", *files)
        self.call("slurmctld", "-c")
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        self.call("slurmd", "-N", node)
        up = ("idle", "mixed", "allocated")
        until(lambda: self.node_state(node) in up, f"{node} is up", SECONDS)

    def node_state(self, node: str) -> str:
        return self.call("sinfo", "--noheader", "--nodes", node, "--format", "%T")

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node, and of each of its steps the manager and the tasks."""
        tasks = set(self.tasks(node))
        managers = {parent for pid in tasks if (parent := _parent(pid)) not in tasks}
        daemon = int((self.folder / f"{node}.pid").read_text())
        for pid in (daemon, *managers, *tasks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tasks(self, node: str, word: str = "") -> list[int]:
        """Return the processes of jobs on a node whose command line has the word."""
        return [
            pid
            for pid in _processes()
            if f"SLURMD_NODENAME={node}" in self._variables(pid)
            and word in _read(Path(f"/proc/{pid}/cmdline"))
        ]

    def _variables(self, pid: int) -> set[str]:
        """Return the variables of a process of this cluster; none of another process."""
        with suppress(OSError):
            found = set(Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"))
            if f"SLURM_CONF={self.folder / 'slurm.conf'}" in found:
                return found
        return set()

    def submit(self, *arguments: str, **environment: str) -> "SlurmJob":
        environment = {"PORT": str(free_port()), **environment}
        return SlurmJob(self, self.call("sbatch", "--parsable", *arguments, **environment))

    def stop(self) -> None:
        """Cancel all jobs, and end the daemons."""
        self.call("scancel", "--user", getuser(), "--full")
        until(lambda: not self.call("squeue", "--noheader"), "all jobs ended", SECONDS)
        files = [*(f"{node}.pid" for node in NODES), "slurmctld.pid", "munge/pid"]
        for file in files:
            with suppress(OSError):
                os.kill(int((self.folder / file).read_text()), signal.SIGTERM)


class SlurmJob:
    """A job of the script, with the folder of its files."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self.slurm = slurm
        self.number = number
        self.folder = slurm.folder / f"job-{number}"
        self.submitted = time.monotonic()

    @property
    def output(self) -> str:
        return _read(self.slurm.folder / f"slurm-{self.number}.out")

    @property
    def servers_log(self) -> str:
        return _read(self.folder / "servers.log")

    def wait_for(self, pattern: str, times: int = 1, seconds: float = SECONDS) -> float:
        """Wait until the output has the pattern this number of times; return the time."""

        def has_pattern() -> bool:
            has_ended = self.state in ENDED
            is_found = len(re.findall(pattern, self.output)) >= times
            assert is_found or not has_ended, f"the job ended without {pattern}"
            return is_found

        self._until(has_pattern, pattern, seconds)
        return time.monotonic()

    def wait(self, seconds: float = SECONDS) -> str:
        """Wait for the end; return the exit code in Slurm's notation, CODE:SIGNAL."""
        self._until(lambda: self.state in ENDED, "the end of the job", seconds)
        return self.field("ExitCode")

    def _until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        try:
            until(condition, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.everything}") from None

    @property
    def last_epoch(self) -> int:
        return max(int(number) for number in re.findall(r"epoch (\d+):", self.output))

    @property
    def everything(self) -> str:
        return f"{self.state}\n{self.output}\n--- servers.log\n{self.servers_log}"

    def field(self, name: str) -> str:
        found = re.search(
            rf"\b{name}=(\S+)", self.slurm.call("scontrol", "show", "job", self.number)
        )
        return found[1] if found else ""

    @property
    def state(self) -> str:
        return self.field("JobState")


@contextmanager
def slurm_in(folder: Path) -> Iterator[Slurm]:
    slurm = Slurm(folder)
    slurm.start()
    try:
        yield slurm
    finally:
        slurm.stop()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
