"""Measure on a GPU, in about three minutes: digits, and where the time of a large step goes.

python -m benchmarks.gpu.measure FOLDER            FOLDER/benchmark.json and the table
python -m benchmarks.gpu.measure FOLDER --small    a tiny model on the CPU, to try this program
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.step import median_seconds
from benchmarks.machine import machine, versions
from pscommon.core.partition import ByteRange
from psworker.model.flat_buffer import CudaBuffer, pin

BIN = Path(sys.executable).parent
LIMIT_SECONDS = 150

PS_RUN = ("--servers", "2")


class Case(NamedTuple):
    """One way to train. how: Arguments of job.optimizer."""

    name: str
    how: dict[str, bool]
    flags: tuple[str, ...]


CASES = (
    Case("shared memory", {}, ("--lanes", "shm")),
    Case("shared memory, overlap", {"overlap": True}, ("--lanes", "shm")),
    Case("stream", {}, ("--lanes", "stream")),
    Case("stream, overlap", {"overlap": True}, ("--lanes", "stream")),
    Case("stream, async pipeline", {"pipeline": True}, ("--lanes", "stream", "--policy", "async")),
    Case("group of 2 ranks", {}, ("--group-size", "2")),
)
"""The group has half the samples on each rank; both ranks use the one GPU."""


class Size(NamedTuple):
    """The model's layers, width and vocabulary; sequences and tokens of a batch; timed steps."""

    shape: tuple[int, int, int]
    batch: tuple[int, int]
    steps: int


FULL = Size((24, 1024, 50_000), (8, 512), 6)  # 354 million parameters
SMALL = Size((2, 64, 100), (2, 16), 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device, size = ("cpu", SMALL) if options.small else ("cuda", FULL)
    found: dict[str, Any] = {"machine": machine() | versions() | {"device": _name(device)}}
    show("machine", found["machine"])
    failed = []

    def measure(name: str, act: Callable[[], dict[str, Any]]) -> None:
        begin = time.monotonic()
        try:
            found[name] = act()
        except (subprocess.SubprocessError, RuntimeError) as error:
            failed.append(name)
            found[name] = {"failed": str(error)}
        show(name, found[name] | {"measured in s": round(time.monotonic() - begin)})

    for place in ("cpu", device):
        measure(f"digits on {place}", lambda place=place: digits(place, options.small))  # type: ignore[misc]
    for case in CASES:
        measure(case.name, lambda case=case: steps(case, device, size))  # type: ignore[misc]
    if device == "cuda":
        measure("copies", copies)
    (options.folder / "benchmark.json").write_text(json.dumps(found, indent=2) + "\n")
    return 1 if failed else 0


def show(name: str, values: dict[str, Any]) -> None:
    shown = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
    )
    print(f"{name}: {', '.join(shown)}", flush=True)


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def digits(device: str, is_short: bool) -> dict[str, Any]:
    """Train the digits example with two workers; return its duration and accuracy."""
    if find_spec("sklearn") is None:
        return {"skipped": "scikit-learn, which has the images, is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "end.json"
        flags = ("--workers", "2", "--device", device, "--summary", str(summary))
        script = ("-m", "psworker.examples.digits", "--epochs", "1" if is_short else "12")
        seconds = _timed(folder, {}, *flags, *script)
        metrics = json.loads(summary.read_text())["metrics"]
    return {"seconds": seconds, "accuracy": metrics["accuracy"]}


def steps(case: Case, device: str, size: Size) -> dict[str, Any]:
    """Return the milliseconds of a step and of its parts."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "step.json"
        ranks = 2 if "--group-size" in case.flags else 1
        batch = (max(1, size.batch[0] // ranks), size.batch[1])
        order = {
            "how": case.how,
            "shape": size.shape,
            "batch": batch,
            "steps": size.steps,
            "output": str(output),
        }
        script = (*case.flags, "--device", device, "-m", "benchmarks.gpu.step")
        _timed(folder, {"BENCH_OPTIONS": json.dumps(order)}, *script)
        return {f"{name} ms": 1e3 * value for name, value in json.loads(output.read_text()).items()}


def _timed(folder: str, environment: dict[str, str], *arguments: str) -> float:
    """Run ps-run; return its duration in seconds. Raises subprocess.SubprocessError."""
    command = [str(BIN / "ps-run"), *PS_RUN, *arguments]
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    begin = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        print(done.stdout[-3000:], flush=True)
        raise subprocess.CalledProcessError(done.returncode, command)
    return time.monotonic() - begin


def copies() -> dict[str, Any]:
    """Return the milliseconds of copying 1.4 GB, with client memory that is pinned and not."""
    device, nbytes, found = torch.device("cuda"), 1_400_000_000, {}
    everything = [ByteRange(0, nbytes)]
    for kind in ("not pinned", "pinned"):
        memory = torch.zeros(nbytes, dtype=torch.uint8).numpy().data
        if kind == "pinned" and not pin(memory):
            raise RuntimeError("cudaHostRegister refuses to pin memory")
        buffer = CudaBuffer(memory, device)

        def out(buffer: CudaBuffer = buffer) -> None:
            buffer.to_host(everything).synchronize()

        def into(buffer: CudaBuffer = buffer) -> None:
            buffer.from_host(everything)
            buffer.wait_until_read()

        found[f"GPU to {kind} ms"] = 1e3 * median_seconds(out, device, 5)
        found[f"{kind} to GPU ms"] = 1e3 * median_seconds(into, device, 5)
    return found


if __name__ == "__main__":
    sys.exit(main())
