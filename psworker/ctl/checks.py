"""What `ps-ctl doctor` looks at. Each check gives one finding, and what to do where it is not
well.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from pscommon.core.errors import PSError
from pscommon.system import thread_team as team
from psworker.ctl.output import size

State = Literal["ok", "warning", "problem"]
MEBIBYTE = 1 << 20
PACKAGES = ("paramserver", "grpcio", "protobuf", "numpy", "safetensors")
SLOW_CALL_MS = 5.0
SLOW_STREAM = 100.0


class Finding(NamedTuple):
    """What a check found. remedy: empty where all is well."""

    check: str
    state: State
    text: str
    remedy: str = ""


def python() -> Finding:
    return Finding(
        "python",
        "ok",
        f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}",
    )


def packages() -> Finding:
    try:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    except importlib.metadata.PackageNotFoundError as error:
        return Finding(
            "packages", "problem", f"{error.name} is not installed", "pip install paramserver"
        )
    return Finding("packages", "ok", ", ".join(versions))


def torch() -> Finding:
    try:
        import torch as framework
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        return Finding(
            "torch", "problem", f"cannot be imported: {error}", "pip install 'torch>=2.6'"
        )
    return Finding("torch", "ok", f"{framework.__version__}, {framework.get_num_threads()} threads")


def devices() -> Finding:
    try:
        import torch as framework
    except (ImportError, OSError):
        return Finding("devices", "problem", "unknown without torch", "see torch")
    if not framework.cuda.is_available():
        built = framework.version.cuda is not None
        return Finding(
            "devices",
            "ok",
            "no GPU in use: " + ("none is visible" if built else "torch is built for CPU"),
        )
    cuda = framework.cuda
    try:
        names = [
            f"cuda:{index} {cuda.get_device_name(index)}" for index in range(cuda.device_count())
        ]
    except RuntimeError as error:  # another process has it for itself, say, or it has failed
        reason = str(error).partition("\n")[0]
        return Finding(
            "devices",
            "problem",
            f"torch cannot use its GPU: {reason}",
            "see nvidia-smi, or use --device cpu",
        )
    return Finding("devices", "ok", ", ".join(names))


def cores() -> Finding:
    return Finding("cores", "ok", f"{team.cores()} usable of {os.cpu_count()}")


def memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    try:
        lines = (line.split() for line in meminfo.read_text().splitlines())
        values = {
            line[0].rstrip(":"): int(line[1]) * 1024
            for line in lines
            if len(line) > 1 and line[1].isdecimal()
        }
        total, free = values["MemTotal"], values["MemAvailable"]
    except (OSError, KeyError) as error:
        return Finding(
            "memory", "warning", f"unknown: {error!r}", "check that the weights fit 4 times"
        )
    text = f"{size(free)} available of {size(total)}"
    if free < 1 << 30:
        return Finding(
            "memory",
            "warning",
            text,
            "a server needs about 4 times its share of the weights with Adam",
        )
    return Finding("memory", "ok", text)


def port(number: int) -> Finding:
    """Whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            remedy = "stop its holder, or give servers another --bind HOST:PORT (port 0 picks a free one)"
            return Finding(
                f"port {number}", "problem", f"cannot be bound: {error.strerror}", remedy
            )
    return Finding(f"port {number}", "ok", "free")


def data_dir(path: Path) -> Finding:
    """Whether a snapshot could be written there, and how long its fsync takes."""
    name = f"folder {path}"
    try:
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(MEBIBYTE))
            file.flush()
            os.fsync(file.fileno())
        taken = time.perf_counter() - began
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(
            name, "problem", f"cannot be written: {error.strerror}", "give another --data-dir"
        )
    text = f"writable, {size(free)} free, 1 MiB on disk in {taken * 1e3:.1f} ms"
    if free < 1 << 30:
        return Finding(
            name,
            "warning",
            text,
            "free some space: snapshots take up to 3 times the weights each with Adam",
        )
    return Finding(name, "ok", text)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding(
            str(path),
            "warning",
            f"not there: {error.strerror}",
            "DataLoader workers need it: mount a tmpfs",
        )
    text = f"{size(usage.free)} free of {size(usage.total)}"
    if usage.free <= 64 * MEBIBYTE:
        return Finding(
            str(path), "warning", text, "DataLoader workers may need more: docker run --shm-size=1g"
        )
    return Finding(str(path), "ok", text)


def loopback() -> Finding:
    from psworker.ctl.rpc_speed import measure

    try:
        speed = measure()
    except PSError as error:
        return Finding(
            "loopback gRPC", "problem", str(error), "check firewall, proxies and security modules"
        )
    text = f"{speed.round_trip:.2f} ms a call, {speed.rate:.0f} MB/s there and back"
    if speed.round_trip > SLOW_CALL_MS or speed.rate < SLOW_STREAM:
        return Finding(
            "loopback gRPC",
            "warning",
            text,
            "this machine is busy or slow: every step will be, too",
        )
    return Finding("loopback gRPC", "ok", text)


def all_checks(ports: tuple[int, ...], folder: Path) -> list[Callable[[], Finding]]:
    """In the order in which they are shown."""
    return [
        python,
        packages,
        torch,
        devices,
        cores,
        memory,
        *(partial(port, number) for number in ports),
        partial(data_dir, folder),
        shared_memory,
        loopback,
    ]
