"""Real processes that do not accept one another: exit code 13, with the cause and a remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.exit_codes import ExitCode
from pscommon.security.credentials import Credentials, use_credentials
from pscommon.security.tls import Tls
from pscommon.security.tls_files import CLIENT_NAME, TlsFiles, TlsMaterial
from pscommon.security.tokens import new_tokens, write_tokens
from tests.support.certificates import new_authority, write_files
from tests.support.cluster import Cluster
from tests.support.ports import free_ports
from tests.support.process_job import MODULES, kill
from tests.support.programs import Program, Programs, programs_in

AUTHORITY = new_authority()
PUSHING = """
import numpy as np
import psworker
with psworker.Client() as client:
    client.register({"w": np.zeros(4, np.float32)}, psworker.OptimizerSpec("sgd", lr=1.0))
    while True:
        client.push_pull({"w": np.ones(4, np.float32)})
        print("pushed", flush=True)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(PUSHING)
        yield programs


def certificate(folder: Path, **options: Any) -> TlsFiles:
    folder.mkdir()
    return write_files(folder, **{"authority": AUTHORITY, **options})


def tls_flags(folder: Path, **options: Any) -> tuple[object, ...]:
    """Return the options of a process with a new certificate."""
    files = certificate(folder, **options)
    return ("--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key)


def token_flags(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return the options for the token of each role, and of a server."""
    tokens = new_tokens()
    write_tokens(folder / "tokens", tokens, {})
    flags: dict[str, tuple[object, ...]] = {"all": ("--token-file", folder / "tokens"), "no": ()}
    for role, token in tokens:
        path = folder / f"{role}.token"
        path.touch(0o600)
        path.write_text(token)
        flags[role] = ("--token-file", path)
    return flags


def server(programs: Programs, *flags: object) -> str:
    """Start a shard 0; return its address."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    start_server(programs, address, *flags)
    return address


def start_server(programs: Programs, address: str, *flags: object) -> Program:
    port = ("--bind", address, "--shard", "0/1")
    started = programs.fork("ps-server", *port, *flags, PYTHONPATH=MODULES)
    started.wait_for("listening")
    return started


def worker(programs: Programs, address: str, *flags: object) -> Program:
    place = ("--ps", address, "--worker-rank", 0, "--device", "cpu")
    return programs.fork("ps-worker", *place, *flags, "train.py", PYTHONPATH=MODULES)


def check_refused(program: Program, problem: str) -> None:
    """Check that it ends with 13, names the problem and a remedy, and shows no traceback."""
    code = program.wait()
    assert code == ExitCode.AUTHENTICATION, program.output
    assert problem in program.err
    assert "Try: " in program.err
    assert "Traceback" not in program.output


@contextmanager
def server_with(certificate: TlsFiles) -> Iterator[str]:
    """Yield the address of a server with a certificate that ps-server would not start with."""
    content = [path.read_bytes() for path in (certificate.ca, certificate.cert, certificate.key)]
    material = TlsMaterial(*content, 0.0, ())
    use_credentials(Credentials(Tls(certificate, read=lambda *_: material)))
    cluster = Cluster()
    try:
        yield cluster.address
    finally:
        cluster.close()
        use_credentials(None)


def test_a_worker_without_tls_names_a_server_that_uses_it(programs: Programs) -> None:
    address = server(programs, *tls_flags(programs.folder / "server"))

    check_refused(worker(programs, address), "uses TLS, and this process has no certificate")


def test_a_worker_with_tls_names_a_server_that_does_not_use_it(programs: Programs) -> None:
    flags = tls_flags(programs.folder / "worker", names=[CLIENT_NAME])

    check_refused(
        worker(programs, server(programs), *flags), "does not use TLS, and this process does"
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"end": -0.5}, "has expired: it is valid from"),
        ({"authority": new_authority()}, "is not of the CA in"),
        ({"names": [CLIENT_NAME]}, "lacks the DNS name paramserver"),
    ],
    ids=["expired", "foreign CA", "wrong name"],
)
def test_a_worker_and_ps_ctl_refuse_a_server(
    programs: Programs, options: dict[str, Any], problem: str
) -> None:
    flags = tls_flags(programs.folder / "client", names=[CLIENT_NAME])
    with server_with(certificate(programs.folder / "server", **options)) as address:
        ctl = programs.start("ps-ctl", "status", "--ps", address, *flags)

        check_refused(worker(programs, address, *flags), problem)
        check_refused(ctl, problem)


def test_an_expired_certificate_of_its_own_ends_a_process_at_its_start(programs: Programs) -> None:
    flags = tls_flags(programs.folder / "expired", end=-0.5)

    check_refused(programs.fork("ps-server", *flags, PYTHONPATH=MODULES), "has expired")
    check_refused(worker(programs, "127.0.0.1:1", *flags), "has expired")
    check_refused(programs.run("ps-ctl", "status", "--ps", "127.0.0.1:1", *flags), "has expired")


def test_a_server_does_not_start_with_the_certificate_of_a_client(programs: Programs) -> None:
    flags = tls_flags(programs.folder / "client", names=[CLIENT_NAME])
    started = programs.fork("ps-server", *flags, PYTHONPATH=MODULES)

    assert started.wait() == ExitCode.USAGE
    assert "lacks the DNS name paramserver" in started.err


@pytest.mark.parametrize("token", ["no", "read", "foreign"])
def test_a_worker_needs_the_token_of_a_worker(programs: Programs, token: str) -> None:
    flags = token_flags(programs.folder)
    address = server(programs, *flags["all"])
    problem = {
        "no": "there is none",
        "read": "needs a token of the role worker, and this one is of the role read",
        "foreign": "the server does not know the token",
    }[token]
    other = programs.folder / "other"
    other.mkdir()
    shown = {**flags, "foreign": token_flags(other)["worker"]}[token]

    # another user: who owns the server finds its token in the registry of jobs
    started = programs.fork(
        "ps-worker", "--ps", address, "--worker-rank", 0, "--device", "cpu", *shown, "train.py",
        PYTHONPATH=MODULES, XDG_RUNTIME_DIR=programs.temporary,
    )  # fmt: skip
    check_refused(started, problem)


def test_ps_ctl_needs_the_token_of_an_admin_to_stop_a_job(programs: Programs) -> None:
    flags = token_flags(programs.folder)
    address = server(programs, *flags["all"])

    stopping = ("stop", "--yes", "--ps", address)
    check_refused(
        programs.run("ps-ctl", *stopping, *flags["worker"]),
        "needs a token of the role admin, and this one is of the role worker",
    )
    assert programs.run("ps-ctl", *stopping, *flags["admin"]).wait() == 0


@pytest.mark.parametrize("kind", ["shard", "standby"])
@pytest.mark.parametrize("cause", ["foreign CA", "token"])
def test_a_server_that_shard_0_refuses_ends(programs: Programs, kind: str, cause: str) -> None:
    flags = token_flags(programs.folder)
    first = tls_flags(programs.folder / "first")
    address, own = f"127.0.0.1:{free_ports(1)[0]}", f"127.0.0.1:{free_ports(1)[0]}"
    shards = "2" if kind == "shard" else "1"
    programs.fork(
        "ps-server", "--bind", address, "--shard", f"0/{shards}", *first, *flags["all"],
        PYTHONPATH=MODULES,
    ).wait_for("listening")  # fmt: skip
    place = {
        "shard": ("--shard", "1/2", "--join", address),
        "standby": ("--shard", "0/1", "--standby-of", address),
    }[kind]
    shown = (
        (*tls_flags(programs.folder / "other", authority=new_authority()), *flags["all"])
        if cause == "foreign CA"
        else (*tls_flags(programs.folder / "other"), *flags["worker"])
    )

    refused = programs.fork("ps-server", "--bind", own, *place, *shown, PYTHONPATH=MODULES)

    problem = "is not of the CA in" if cause == "foreign CA" else "this one is of the role worker"
    check_refused(refused, problem)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ({}, {"authority": new_authority()}, "is not of the CA in"),
        ({}, None, "does not use TLS, and this process does"),
        (None, {}, "uses TLS, and this process has no certificate"),
    ],
    ids=["foreign CA", "plain server", "plain worker"],
)
def test_a_worker_that_trained_before_logs_the_cause_and_retries(
    programs: Programs,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    problem: str,
) -> None:
    """The operator may be replacing files: it ends only after `--connect-timeout`."""

    def flags(name: str, options: dict[str, Any] | None) -> tuple[object, ...]:
        return () if options is None else tls_flags(programs.folder / name, **options)

    address = f"127.0.0.1:{free_ports(1)[0]}"
    first = start_server(programs, address, *flags("server", before))
    started = worker(programs, address, *flags("worker", before), "--connect-timeout", "15s")
    started.wait_for("pushed")
    kill(first)

    start_server(programs, address, *flags("other", after))

    started.wait_for(problem)
    assert started.process.poll() is None
    assert started.wait() == ExitCode.UNREACHABLE
    assert "request_repeated" in started.output
