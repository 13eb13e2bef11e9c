"""`ps-ctl doctor`: check whether this machine can run servers and workers."""

import importlib.metadata
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import click
import grpc

from pscommon.core.errors import PSError
from pscommon.environments.detection import FLAGS, find, merged, surroundings
from pscommon.environments.place import Role
from pscommon.security.credentials import NONE
from pscommon.security.settings import SecuritySettings
from pscommon.security.tls_files import (
    TlsFiles,
    certificates_in,
    expiry_warning,
    moment,
    read_tls,
)
from pscommon.security.tokens import read_tokens
from pscommon.settings.values import FOLDER
from pscommon.system import thread_team
from pscommon.wire.endpoint import Endpoint, listen_grpc, open_channel
from pscommon.wire.frames import FRAME_BYTES
from pscommon.wire.status import translated
from psworker.ctl.context import CommandContext, pass_settings, shared
from psworker.ctl.output import Table, show, size

State = Literal["ok", "warning", "problem"]
BYTES_PER_MEBIBYTE = 1 << 20
PACKAGES = ("paramserver", "grpcio", "protobuf", "numpy", "safetensors", "cryptography")
SHARED_MEMORY = Path("/dev/shm")
REMEDY = ". Try: "
"""Separates cause and remedy in a message."""

SLOW_CALL_MILLISECONDS = 5.0
SLOW_STREAM_MEGABYTES_PER_SECOND = 100.0

ECHO = "/paramserver.Doctor/Echo"
STREAM = "/paramserver.Doctor/Stream"
CALL_COUNT = 50
FRAME_COUNT = 128
CALL_SECONDS = 20.0


class Finding(NamedTuple):
    """What a check has found; the remedy is empty without a problem."""

    state: State
    text: str
    remedy: str = ""


def python() -> Finding:
    """Report the Python interpreter."""
    return Finding(
        "ok", f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    )


def packages() -> Finding:
    """Check that the required packages are installed."""
    try:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    except importlib.metadata.PackageNotFoundError as error:
        return Finding("problem", f"{error.name} is not installed", "pip install paramserver")
    return Finding("ok", ", ".join(versions))


def torch() -> Finding:
    """Check that torch can be imported."""
    try:
        import torch as framework
    except (ImportError, OSError) as error:  # OSError: a shared library does not load
        return Finding("problem", f"cannot be imported: {error}", "pip install 'torch>=2.6'")
    return Finding("ok", f"{framework.__version__}, {framework.get_num_threads()} threads")


def devices() -> Finding:
    """Check that torch can use every visible GPU."""
    try:
        import torch as framework
    except (ImportError, OSError):
        return Finding("problem", "unknown without torch", "install torch first")
    if not framework.cuda.is_available():
        built = framework.version.cuda is not None
        return Finding(
            "ok", "no GPU in use: " + ("none is visible" if built else "torch is built for CPU")
        )
    cuda = framework.cuda
    try:
        names = [
            f"cuda:{index} {cuda.get_device_name(index)}" for index in range(cuda.device_count())
        ]
    except RuntimeError as error:  # in exclusive use by another process, or broken
        reason = str(error).partition("\n")[0]
        return Finding(
            "problem",
            f"torch cannot use its GPU: {reason}",
            "check nvidia-smi, or use --device cpu",
        )
    return Finding("ok", ", ".join(names))


def cores() -> Finding:
    """Report the number of usable cores."""
    return Finding("ok", f"{thread_team.cores()} usable of {os.cpu_count()}")


def memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Check the available memory."""
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
            "warning", f"unknown: {error!r}", "check that memory holds 4 times the weights"
        )
    text = f"{size(free)} available of {size(total)}"
    if free < 1 << 30:
        return Finding(
            "warning",
            text,
            "free some memory: with Adam a server needs about 4 times its share of the weights",
        )
    return Finding("ok", text)


def port(number: int) -> Finding:
    """Check that a server can listen on this port of 127.0.0.1."""
    from pscommon.wire.endpoint import Endpoint, listen

    try:
        listen(Endpoint(f"127.0.0.1:{number}")).close()
    except OSError as error:
        remedy = "stop the process that uses it, or set --bind HOST:PORT (port 0 picks a free port)"
        return Finding("problem", f"cannot be bound: {error.strerror}", remedy)
    return Finding("ok", "free")


def data_dir(path: Path) -> Finding:
    """Check that a snapshot can be written to this directory, and measure an fsync."""
    try:
        start = time.perf_counter()
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(BYTES_PER_MEBIBYTE))
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(
            "problem", f"cannot be written: {error.strerror}", "choose another --data-dir"
        )
    text = f"writable, {size(free)} free, 1 MiB on disk in {seconds * 1e3:.1f} ms"
    if free < 1 << 30:
        return Finding(
            "warning",
            text,
            "free some space: with Adam each snapshot takes up to 3 times the weights",
        )
    return Finding("ok", text)


def shared_memory(path: Path = SHARED_MEMORY) -> Finding:
    """Check the free space for what the processes of a DataLoader pass on."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding(
            "warning", f"missing: {error.strerror}", "mount a tmpfs; DataLoader workers need it"
        )
    text = f"{size(usage.free)} free of {size(usage.total)}"
    if usage.free <= 64 * BYTES_PER_MEBIBYTE:
        return Finding("warning", text, "use docker run --shm-size=1g if a DataLoader has workers")
    return Finding("ok", text)


class RpcSpeed(NamedTuple):
    """Measured speed of gRPC over 127.0.0.1, with a server and a client in this process.

    Attributes:
        round_trip: median time of a tiny call, in milliseconds.
        rate: rate of an echoed stream, in 1e6 bytes a second.
    """

    round_trip: float
    rate: float


def measure() -> RpcSpeed:
    """Measure round trip and rate, in less than a second on a healthy machine.

    Raises:
        PSError: calls over 127.0.0.1 fail.
    """
    server, address = listen_grpc(Endpoint("127.0.0.1:0", NONE), CALL_COUNT, [_Echo()])
    try:
        server.start()
        with (
            open_channel(Endpoint(address, NONE)) as channel,
            translated(f"the test server at {address}"),
        ):
            return RpcSpeed(_round_trip(channel), _rate(channel))
    finally:
        server.stop(None).wait(CALL_SECONDS)


class _Echo(grpc.GenericRpcHandler):
    """Server that returns the bytes it receives."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:  # type: ignore[type-arg]
        if details.method == ECHO:
            return grpc.unary_unary_rpc_method_handler(lambda data, _: data)
        if details.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(lambda frames, _: frames)
        return None


def _round_trip(channel: grpc.Channel) -> float:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ECHO)
    call(b"", timeout=CALL_SECONDS)  # connects
    times = []
    for _ in range(CALL_COUNT):
        start = time.perf_counter()
        call(b"x", timeout=CALL_SECONDS)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _rate(channel: grpc.Channel) -> float:
    frame = bytes(FRAME_BYTES)

    def frames() -> Iterator[bytes]:
        for _ in range(FRAME_COUNT):
            yield frame

    stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(STREAM)
    start = time.perf_counter()
    received = sum(map(len, stream(frames(), timeout=CALL_SECONDS)))
    return received / (time.perf_counter() - start) / 1e6


def loopback() -> Finding:
    """Measure gRPC over 127.0.0.1."""
    try:
        speed = measure()
    except PSError as error:
        return Finding("problem", str(error), "check firewall, proxies and security modules")
    text = f"{speed.round_trip:.2f} ms a call, {speed.rate:.0f} MB/s in both directions"
    if speed.round_trip > SLOW_CALL_MILLISECONDS or speed.rate < SLOW_STREAM_MEGABYTES_PER_SECOND:
        return Finding(
            "warning", text, "reduce the load of this machine; slow calls slow down every step"
        )
    return Finding("ok", text)


def certificate(files: TlsFiles) -> Finding:
    """Check the TLS files, and show the names and dates of the certificate."""
    try:
        material = read_tls(files)
        leaf = certificates_in(material.cert, f"the certificate {files.cert}")[0]
    except PSError as error:
        return _problem(error)
    begin, end = leaf.not_valid_before_utc.timestamp(), material.expires
    names = ", ".join(material.names) or "no DNS name"
    text = f"{names}; valid from {moment(begin)} to {moment(end)}"
    warning = expiry_warning(end, time.time())
    if warning is not None:
        return Finding("warning", text, warning.partition(REMEDY)[2])
    return Finding("ok", text)


def token_file(path: Path) -> Finding:
    """Check the token file, and show its roles."""
    try:
        tokens = read_tokens(path)
    except PSError as error:
        return _problem(error)
    return Finding("ok", "tokens of " + ", ".join(dict.fromkeys(role for role, _ in tokens)))


def _problem(error: PSError) -> Finding:
    text, _, remedy = str(error).partition(REMEDY)
    return Finding("problem", text, remedy)


def environment(role: Role) -> Finding:
    """Show what the engine's environment says about a process of this role, and from what."""
    try:
        places = find(surroundings(), role)
        own = [place for place in places if place.role in (None, role)]
        merged(own, role, FLAGS[role])
    except PSError as error:
        return _problem(error)
    if len(own) < len(places):
        names = ", ".join(place.environment for place in places if place not in own)
        return Finding("ok", f"{names} says that this is no {role}")
    if not own:
        return Finding("ok", "no engine detected; the flags say all")
    texts = [
        f"{place.environment} ({', '.join(place.variables)})"
        f"{' wins' if place is own[0] and len(own) > 1 else ''}: {place}"
        for place in own
    ]
    return Finding("ok", ". Then ".join(texts))


def all_checks(
    ports: tuple[int, ...], folder: Path, security: SecuritySettings
) -> list[tuple[str, Callable[[], Finding]]]:
    """Return all checks with their names, in display order."""
    tls, tokens = security.tls, security.token_file
    return [
        ("python", python),
        ("packages", packages),
        ("torch", torch),
        ("devices", devices),
        ("cores", cores),
        ("memory", memory),
        *((f"port {number}", partial(port, number)) for number in ports),
        (f"folder {folder}", partial(data_dir, folder)),
        (str(SHARED_MEMORY), shared_memory),
        *([("certificate", partial(certificate, tls))] if tls is not None else []),
        *([("token file", partial(token_file, tokens))] if tokens is not None else []),
        ("ps-server here", partial(environment, "server")),
        ("ps-worker here", partial(environment, "worker")),
        ("loopback gRPC", loopback),
    ]


@click.command(
    epilog="\b\nExamples:\n  ps-ctl doctor\n  ps-ctl doctor --port 50051 --port 50052 --data-dir "
    "/data/job\n  ps-ctl doctor --tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem"
)
@click.option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    default=(50051,),
    show_default=True,
    metavar="PORT",
    help="Server port to check; repeat for several ports.",
)
@click.option(
    "--data-dir",
    type=FOLDER,
    envvar="PS_DATA_DIR",
    default=".",
    show_default=True,
    help="Snapshot directory to check.",
)
@shared
@pass_settings
def doctor(settings: CommandContext, ports: tuple[int, ...], data_dir: Path) -> int:
    """Check Python, devices, ports, disk, certificate and calls of this machine.

    Exit code 1 if there is a problem; every problem is shown with a remedy.
    """
    checks = all_checks(ports, data_dir, settings.security)
    findings = [(name, check()) for name, check in checks]
    rows = [(name, finding.state, finding.text) for name, finding in findings]
    remedies = [(name, finding.remedy) for name, finding in findings if finding.remedy]
    tables = [
        Table("", ("check", "state", "finding"), rows),
        Table("Remedies", ("check", "remedy"), remedies),
    ]
    document = [{"check": name, **finding._asdict()} for name, finding in findings]
    show(settings.output, document, lambda: tables)
    return int(any(finding.state == "problem" for _, finding in findings))
