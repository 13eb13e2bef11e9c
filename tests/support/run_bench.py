"""ps-run with stubs of servers, workers and connections: real processes that start at once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT = 60.0

# A server: binds, writes its port, exits with 0 on request or when the first server has exited.
SERVER = r"""
import os, socket, sys
def flag(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None
print("server", os.getpid(), flag("--shard"), flag("--policy"), flush=True)
if os.environ.get("BROKEN_SERVER") == flag("--shard"):
    if os.environ.get("CODE"):
        os._exit(int(os.environ["CODE"]))
    sys.exit("the data directory is taken")
host, port = flag("--bind").split(":")
with socket.create_server((host, int(port))) as listener:
    port = listener.getsockname()[1]
    with open(flag("--port-file") + ".new", "w") as file:
        file.write(f"{host}:{port}\n")
    os.replace(flag("--port-file") + ".new", flag("--port-file"))
    if flag("--join"):
        first, port = flag("--join").split(":")
        with socket.create_connection((first, int(port))) as link:
            link.recv(1)
        sys.exit(0)
    links = []
    while True:
        links.append(listener.accept()[0])
        links[-1].settimeout(0.2)
        try:
            if links[-1].recv(1) == b"S":
                sys.exit(0)
        except TimeoutError:
            pass
"""

# A spare server: writes its PID and waits for its arguments.
SPARE = r"""
import json, os, runpy, sys
from pathlib import Path
here = Path(__file__).parent
(here / "spare.new").write_text(str(os.getpid()))
(here / "spare.new").replace(here / "spare")
line = sys.stdin.readline()
if line:
    sys.argv = ["server.py", *json.loads(line)]
    runpy.run_path(str(here / "server.py"), run_name="__main__")
"""

# A worker: runs a script as ps-worker does, without torch.
WORKER = r"""
import sys
from psworker.supervision.script import Script, run
at = sys.argv.index("--")
sys.exit(run(Script(sys.argv[at + 1], "-m" in sys.argv[:at], tuple(sys.argv[at + 2 :]))))
"""

# ps-run with these stubs.
RUN = r"""
import functools, socket, sys
from pathlib import Path
from pscommon.settings.command import run_command
from pscommon.core.errors import UnreachableError
from psworker.run import cli, launcher

here = Path(__file__).parent

class Observer:
    def __init__(self, address):
        self.address = address
    def status(self):
        return {"state": "running", "version": 7, "steps": 14, "samples": 448, "policy": "sync",
                "workers": [], "metrics": {"accuracy": 0.97}}
    def weights_sha256(self):
        if (here / "no-model").exists():
            raise UnreachableError("no worker has registered a model")
        return "ab" * 32
    def stop(self):
        host, port = self.address.split(":")
        with socket.create_connection((host, int(port))) as link:
            link.sendall(b"S")
    def report_exit(self, process, reason):
        with (here / "reported").open("a") as file:
            print(process, reason, file=file)
    def close(self):
        pass

launcher.START_SECONDS = launcher.PRELOADED_START_SECONDS = 0.1
start = functools.partial(
    cli.start,
    server=[sys.executable, "-I", "-S", str(here / "server.py")],
    worker=[sys.executable, "-P", str(here / "worker.py")],
    spare=[sys.executable, "-I", "-S", str(here / "spare.py")],
    connect=Observer,
)
sys.exit(run_command(cli.COMMAND, start))
"""


class Bench:
    """A folder with stubs, scripts and a TMPDIR, which must be empty at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        for name, code in {
            "server.py": SERVER,
            "spare.py": SPARE,
            "worker.py": WORKER,
            "run.py": RUN,
        }.items():
            (folder / name).write_text(code)
        self.running: list[subprocess.Popen[str]] = []

    def script(self, code: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(code)
        return str(self.folder / name)

    def popen(self, *args: str, **environment: str) -> subprocess.Popen[str]:
        known = {key: value for key, value in os.environ.items() if not key.startswith("PS_")}
        process = subprocess.Popen(
            [sys.executable, str(self.folder / "run.py"), *args],
            env={**known, "TMPDIR": str(self.temporary), **environment},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def run(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.popen(*args, **environment)
        out, err = process.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(args, process.returncode, out, err)


@contextmanager
def bench_in(folder: Path) -> Iterator[Bench]:
    """Yield a bench and kill its processes at the end."""
    bench = Bench(folder)
    yield bench
    for process in bench.running:
        process.kill()
        process.communicate()
