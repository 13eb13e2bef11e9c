"""`ps-ctl tls init` and `ps-ctl token init` as users start them, under any umask."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pscommon.security.tls_files import TlsFiles, read_tls
from pscommon.security.tokens import ROLES, read_tokens
from tests.support.ports import free_port
from tests.support.programs import BIN, Program, Programs, programs_in

CTL = str(BIN / "ps-ctl")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def run(programs: Programs, umask: str, *args: str) -> Program:
    """Run ps-ctl in a shell with this umask."""
    script = f'umask {umask}; exec "$@"'
    program = programs.start("/bin/sh", "-c", script, "sh", CTL, *args)
    assert program.wait() == 0, program.output
    return program


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


@pytest.mark.parametrize("umask", ["000", "022"])
def test_certificates_can_be_used_and_keys_are_private(umask: str, programs: Programs) -> None:
    folder = programs.folder / "certificates"

    run(programs, umask, "tls", "init", "certificates", "--host", "ps.example.org")

    for prefix, name in (("", "paramserver"), ("client-", "paramserver-client")):
        files = TlsFiles(
            folder / "ca.pem", folder / f"{prefix}cert.pem", folder / f"{prefix}key.pem"
        )
        assert read_tls(files, name).names[0] == name
    assert {mode for name, mode in modes(folder).items() if "key" in name} == {0o600}
    assert {mode for name, mode in modes(folder).items() if "key" not in name} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_tokens_can_be_used_and_are_private(programs: Programs) -> None:
    folder = programs.folder / "tokens"

    run(programs, "000", "token", "init", "tokens")

    assert [role for role, _ in read_tokens(folder / "tokens")] == list(ROLES)
    assert set(modes(folder).values()) == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "kept" in run(programs, "000", "token", "init", "tokens").out


def test_doctor_reads_the_files(programs: Programs) -> None:
    run(programs, "022", "tls", "init", ".")
    flags = ["--tls-ca", "ca.pem", "--tls-cert", "cert.pem", "--tls-key", "key.pem"]
    doctor = run(programs, "022", "doctor", "--port", str(free_port()), *flags)

    assert "paramserver; valid from" in doctor.out
