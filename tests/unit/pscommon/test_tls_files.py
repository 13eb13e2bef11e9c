"""A process's own TLS files are checked before use; messages name the file and a remedy."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from pscommon.core.errors import AuthenticationError, InvalidRequestError
from pscommon.security.certificates import certificate_pem, make_key
from pscommon.security.secret_files import MAX_FILE_BYTES
from pscommon.security.tls_files import TlsFiles, expiry_warning, read_tls
from tests.support.certificates import new_authority, write_files

DAY_SECONDS = 86400


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return write_files(tmp_path)


def problem(files: TlsFiles, needs_name: str | None = None) -> str:
    """Return why the files are refused with exit code 2; the message has one remedy."""
    with pytest.raises(InvalidRequestError) as caught:
        read_tls(files, needs_name)
    assert caught.value.exit_code == 2
    assert str(caught.value).count("Try: ") == 1
    return str(caught.value)


def test_files_that_fit_are_read(files: TlsFiles) -> None:
    material = read_tls(files, "paramserver")

    assert (material.ca, material.cert, material.key) == (
        files.ca.read_bytes(),
        files.cert.read_bytes(),
        files.key.read_bytes(),
    )
    assert material.expires == pytest.approx(time.time() + 30 * DAY_SECONDS, abs=60)
    assert material.names == ("paramserver",)
    assert "PRIVATE" not in repr(material)


@pytest.mark.parametrize("which", ["ca", "cert", "key"])
def test_a_missing_file_is_named(files: TlsFiles, which: str) -> None:
    path = getattr(files, which)
    path.unlink()

    assert f"{path} is missing" in problem(files)


@pytest.mark.parametrize("which", ["ca", "cert", "key"])
@pytest.mark.parametrize(
    "content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_file_without_pem_is_named(files: TlsFiles, which: str, content: bytes) -> None:
    path = getattr(files, which)
    path.write_bytes(content)

    text = problem(files)
    assert str(path) in text
    assert "in PEM format" in text


def test_exchanged_files_are_named(files: TlsFiles) -> None:
    os.chmod(files.cert, 0o600)

    assert f"{files.key} has no valid certificate" in problem(replace(files, cert=files.key))
    assert f"{files.cert} is no private key" in problem(replace(files, key=files.cert))


def test_a_folder_a_pipe_and_a_huge_file_are_refused(files: TlsFiles, tmp_path: Path) -> None:
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    huge.write_bytes(bytes(MAX_FILE_BYTES + 1))

    assert "is not a file" in problem(replace(files, key=tmp_path))
    assert "is not a file" in problem(replace(files, ca=pipe))
    assert f"larger than {MAX_FILE_BYTES} bytes" in problem(replace(files, cert=huge))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602, 0o666])
def test_a_key_that_others_can_use_is_refused_with_its_mode(files: TlsFiles, mode: int) -> None:
    files.key.chmod(mode)

    assert f"(mode {mode:04o}). Try: `chmod 600 {files.key}`" in problem(files)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_key_of_its_owner_alone_is_accepted(files: TlsFiles, mode: int) -> None:
    files.key.chmod(mode)

    assert read_tls(files)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file another owner")
def test_the_group_may_read_a_key_only_if_root_owns_it(files: TlsFiles) -> None:
    files.key.chmod(0o440)
    assert read_tls(files)

    os.chown(files.key, 1000, -1)
    assert "(mode 0440)" in problem(files)

    os.chown(files.key, 0, -1)
    files.key.chmod(0o460)
    assert "(mode 0460)" in problem(files)


READ_AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from pscommon.core.errors import InvalidRequestError
from pscommon.security.secret_files import read_file
os.setuid(65534)
try:
    read_file(Path(sys.argv[1]), "TLS key", "ps-ctl tls init")
except InvalidRequestError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_of_another_user_cannot_be_read(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    path = write_files(tmp_path).key
    command = [sys.executable, "-c", READ_AS_ANOTHER_USER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert re.search("(Permission denied).*make user 65534 its owner", done.stdout), done


def test_a_link_to_a_file_is_followed(files: TlsFiles, tmp_path: Path) -> None:
    """A volume of Kubernetes consists of links."""
    link = tmp_path / "link"
    link.symlink_to(files.key)

    assert read_tls(replace(files, key=link))


def test_a_key_of_another_certificate_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_files(tmp_path / "other")

    text = problem(replace(files, key=other.key))
    assert f"{other.key} does not fit the certificate {files.cert}" in text


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL])
def test_a_passphrase_is_refused_and_never_asked_for(files: TlsFiles, form: PrivateFormat) -> None:
    encryption = BestAvailableEncryption(b"a passphrase")
    files.key.write_bytes(make_key().private_bytes(Encoding.PEM, form, encryption))

    assert f"{files.key} has a passphrase" in problem(files)


def test_a_server_needs_its_name(tmp_path: Path) -> None:
    files = write_files(tmp_path, ["paramserver-client", "other.example"])

    assert read_tls(files).names == ("paramserver-client", "other.example")
    text = problem(files, "paramserver")
    assert "lacks the DNS name paramserver: it has paramserver-client, other.example" in text


@pytest.mark.parametrize(
    ("begin", "end", "text"),
    [
        (-9.0, -2.0, "has expired: it was valid until {end}, and it is {now} now"),
        (2.0, 9.0, "is not valid yet: it is valid from {begin}, and it is {now} now"),
    ],
)
def test_a_certificate_out_of_date_has_exit_code_13_and_both_times(
    begin: float, end: float, text: str, tmp_path: Path
) -> None:
    files = write_files(tmp_path, begin=begin, end=end)

    with pytest.raises(AuthenticationError) as caught:
        read_tls(files)

    assert (caught.value.exit_code, caught.value.reason) == (13, "UNAUTHENTICATED")
    now = time.time()
    days = {"begin": now + begin * DAY_SECONDS, "end": now + end * DAY_SECONDS, "now": now}
    stamps = {name: time.strftime("%Y-%m-%d", time.gmtime(when)) for name, when in days.items()}
    pattern = re.sub(r"\{(\w+)\}", lambda name: stamps[name[1]] + r" [\d:]{8} UTC", text)
    assert re.search(f"{re.escape(str(files.cert))} {pattern}. Try: ", str(caught.value))


def test_the_ca_file_may_hold_old_and_new(files: TlsFiles) -> None:
    """Two authorities, of which one has expired."""
    expired = certificate_pem(new_authority(-9.0, -2.0).certificate)
    now = files.ca.read_text()
    files.ca.write_text(expired + now)
    assert read_tls(files).ca == (expired + now).encode()

    files.ca.write_text(expired)
    with pytest.raises(AuthenticationError, match=f"CA file {files.ca} has expired"):
        read_tls(files)


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (14.1, None),
        (13.9, "expires in 13 days"),
        (0.5, "expires in 0 days"),
        (-0.5, "has expired"),
    ],
)
def test_the_last_14_days_are_a_warning(days: float, text: str | None) -> None:
    warning = expiry_warning(1_000_000.0 + days * DAY_SECONDS, 1_000_000.0)

    assert (text in warning) if text and warning else warning is text


def test_only_tls_imports_the_library() -> None:
    """It takes a tenth of a second, which a process without TLS does not spend."""
    code = (
        "import sys, psworker.ctl.cli, pscommon.security.certificates\n"
        "print('cryptography' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.stdout == "False\n", done.stderr
