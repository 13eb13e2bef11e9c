"""Contender: one of our workers that trains over a slow link. Args: SETUP SERVER_NAMESPACE
WORKER_NAMESPACE.

The words are those of benchmarks.contenders.training.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import link, product
from benchmarks.setup import Setup
from benchmarks.speaker import ORPHAN_GUARD, Command, Speaker, serve

START_SECONDS = 60.0


@contextmanager
def server(setup: Setup, namespace: str) -> Iterator[str]:
    """One server in that namespace; gives its address."""
    product.configure(setup)
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [*link.inside(namespace), sys.executable, "-m", "psserver", "--shard", "0/1"]
        command += ["--bind", f"{link.SERVER_ADDRESS}:0", "--insecure"]
        command += ["--port-file", str(port_file)]
        command += ["--log-level", "warning"]
        guard = [sys.executable, "-I", "-S", str(ORPHAN_GUARD), str(os.getpid())]
        process = subprocess.Popen(
            [*guard, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not port_file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"no server at the far end of the link: exit code {process.poll()}"
                    )
                time.sleep(0.02)
            yield f"{link.SERVER_ADDRESS}:{port_file.read_text().strip()}"
        finally:
            process.terminate()
            process.wait(30)


def main(setup: Setup, server_namespace: str, worker_namespace: str) -> None:
    with server(setup, server_namespace) as address:
        args = (setup.to_json(), address, "0")
        command = Command(
            "benchmarks.contenders.training", args, prefix=link.inside(worker_namespace)
        )
        with Speaker(command) as worker:
            worker.wait_until_ready()
            serve(
                {word: lambda word=word: worker.ask(word) for word in ("go", "compute", "transfer")}
            )  # type: ignore[misc]


if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]), sys.argv[2], sys.argv[3])
