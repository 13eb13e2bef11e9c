"""Run everything that needs a GPU, on a machine without a package index, in about eight minutes.

    python3 run.py                    tests, then the benchmark; results/ has the output
    python3 run.py --only tests       or: --only benchmark

The Python needs torch and pip. The wheels are installed in an environment of their own, env/, that
also sees the packages of this Python.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT, RESULTS = HERE / "env", HERE / "results"
PARTS = ("tests", "benchmark")
PLUGINS = ("-p", "xdist.plugin", "-p", "pytest_timeout")
"""Other plugins that this Python has stay away: PYTEST_DISABLE_PLUGIN_AUTOLOAD."""
PROCESS_COUNT = 4
"""Of the tests, which share the GPU."""
TEST_SECONDS = 60
"""Longest time of one test."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS)
    only = parser.parse_args().only
    python = environment()
    RESULTS.mkdir(exist_ok=True)
    codes = []
    if only != "benchmark":
        files = map(str, sorted((HERE / "tests").rglob("test_*.py")))
        pytest = (
            "pytest",
            *PLUGINS,
            "-m",
            "cuda",
            "-n",
            PROCESS_COUNT,
            "--dist",
            "loadgroup",
            "-v",
        )
        codes.append(run(python, "tests", *pytest, "--timeout", TEST_SECONDS, *files))
    if only != "tests":
        codes.append(run(python, "benchmark", "benchmarks.gpu.measure", RESULTS))
    return max(codes)


def environment() -> Path:
    """Return the Python of an environment with the wheels and this Python's packages."""
    python = ENVIRONMENT / "bin/python"
    if not python.exists():
        venv.create(ENVIRONMENT)
        # not by "system site packages": this Python may be that of an environment itself
        (packages,) = ENVIRONMENT.glob("lib/python3*/site-packages")
        own = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (packages / "packages_of_run.pth").write_text("\n".join(own))
        wheels = sorted(map(str, (HERE / "wheels").glob("*.whl")))
        install = ("--python", str(python), "install", "--quiet", "--no-index", "--no-deps")
        subprocess.run([sys.executable, "-m", "pip", *install, *wheels], check=True)
    return python


def run(python: Path, name: str, module: str, *arguments: object) -> int:
    """Run a module; its output appears here and in a file of the results. Return its exit code."""
    command = [str(python), "-u", "-m", module, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=HERE,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    with (RESULTS / f"{name}.txt").open("wb", buffering=0) as file:
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
            file.write(piece)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
