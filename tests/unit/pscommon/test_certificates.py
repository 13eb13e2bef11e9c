"""`ps-ctl tls init`: the files work in a TLS handshake, and none is lost."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from pscommon.core.errors import AuthenticationError, InvalidRequestError
from pscommon.security.certificates import (
    certificate_pem,
    init_tls,
    key_pem,
    make_certificate,
    make_key,
)
from pscommon.security.tls_files import TlsFiles, read_tls
from tests.support.certificates import new_authority

NAMES = ["ca-key.pem", "ca.pem", "cert.pem", "client-cert.pem", "client-key.pem", "key.pem"]


def pair(folder: Path, prefix: str = "") -> TlsFiles:
    return TlsFiles(folder / "ca.pem", folder / f"{prefix}cert.pem", folder / f"{prefix}key.pem")


def context(side: ssl._SSLMethod, files: TlsFiles) -> ssl.SSLContext:
    made = ssl.SSLContext(side)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_verify_locations(files.ca)
    made.load_cert_chain(files.cert, files.key)
    return made


def shake_hands(server: TlsFiles, client: TlsFiles, name: str) -> None:
    """Connect through memory; both sides verify the other one's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = context(ssl.PROTOCOL_TLS_SERVER, server)
    connecting = context(ssl.PROTOCOL_TLS_CLIENT, client)
    ends = [
        connecting.wrap_bio(to_client, to_server, server_hostname=name),
        accepting.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


def names_of(path: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(path.read_bytes()).extensions
    alternatives = found.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in alternatives]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(before: dict[str, bytes], folder: Path) -> set[str]:
    after = contents(folder)
    return {name for name in after if before.get(name) != after[name]}


def test_all_files_are_made_with_their_modes(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "certificates"

    states = init_tls(folder)

    assert sorted(path.name for path in states) == sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert set(states.values()) == {"written"}
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        name for name in NAMES if "key" in name
    }


def test_server_and_client_accept_each_other_in_both_directions(tmp_path: Path) -> None:
    """Workers serve their metrics, and servers connect to servers."""
    init_tls(tmp_path)
    server, client = pair(tmp_path), pair(tmp_path, "client-")

    assert read_tls(server, "paramserver").names == ("paramserver",)
    assert read_tls(client, "paramserver-client").names == ("paramserver-client",)
    shake_hands(server, client, "paramserver")
    shake_hands(server, server, "paramserver")
    shake_hands(client, server, "paramserver-client")
    with pytest.raises(ssl.SSLCertVerificationError, match="paramserver"):
        shake_hands(client, client, "paramserver")


def test_a_foreign_authority_is_refused(tmp_path: Path) -> None:
    for name in ("own", "foreign"):
        init_tls(tmp_path / name)

    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(pair(tmp_path / "foreign"), pair(tmp_path / "own", "client-"), "paramserver")


def test_a_ca_file_with_old_and_new_accepts_both(tmp_path: Path) -> None:
    for name in ("old", "new"):
        init_tls(tmp_path / name)
    old, new = (tmp_path / name / "ca.pem" for name in ("old", "new"))
    both = old.read_text() + new.read_text()
    for path in (old, new):
        path.write_text(both)

    shake_hands(pair(tmp_path / "old"), pair(tmp_path / "new", "client-"), "paramserver")
    shake_hands(pair(tmp_path / "new"), pair(tmp_path / "old", "client-"), "paramserver")
    assert "written" not in init_tls(tmp_path / "new").values()
    init_tls(tmp_path / "new", renew=True)  # finds the authority of its key
    shake_hands(pair(tmp_path / "new"), pair(tmp_path / "old", "client-"), "paramserver")


def test_lifetimes(tmp_path: Path) -> None:
    init_tls(tmp_path)
    now = datetime.now(UTC)
    for name, days in (("ca", 3650), ("cert", 365), ("client-cert", 365)):
        made = x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes())
        assert abs(made.not_valid_after_utc - now - timedelta(days=days)) < timedelta(minutes=1)
        assert made.not_valid_before_utc < now - timedelta(minutes=59)


def test_hosts_are_names_of_the_server(tmp_path: Path) -> None:
    init_tls(tmp_path, ["ps.example.org", "10.0.0.7", "::1", "*.local", "ps.example.org"])
    names = ["paramserver", "ps.example.org", "10.0.0.7", "::1", "*.local"]

    assert names_of(tmp_path / "cert.pem") == names
    assert set(init_tls(tmp_path, ["0:0:0:0:0:0:0:1"]).values()) == {"kept"}
    assert names_of(tmp_path / "client-cert.pem") == ["paramserver-client"]
    shake_hands(pair(tmp_path), pair(tmp_path, "client-"), "10.0.0.7")
    shake_hands(pair(tmp_path), pair(tmp_path, "client-"), "ps.example.org")


@pytest.mark.parametrize("host", ["", "a:1", "a b", "-a", "a..b", "h\u00f6st", "a" * 254, "*"])
def test_an_invalid_host_is_refused_before_anything_is_made(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="neither a DNS name nor an IP address"):
        init_tls(tmp_path / "new", [host])
    assert not (tmp_path / "new").exists()


def test_existing_files_stay(tmp_path: Path) -> None:
    init_tls(tmp_path, ["a.example"])
    before = contents(tmp_path)

    states = init_tls(tmp_path, ["a.example"])

    assert set(states.values()) == {"kept"}
    assert sorted(path.name for path in states) == NAMES
    assert contents(tmp_path) == before


def test_a_host_that_an_existing_certificate_lacks_is_an_error(tmp_path: Path) -> None:
    init_tls(tmp_path)

    with pytest.raises(InvalidRequestError, match=r"lacks b\.example\. Try: `--renew`"):
        init_tls(tmp_path, ["b.example"])


def test_renew_makes_new_pairs_of_the_same_authority(tmp_path: Path) -> None:
    init_tls(tmp_path, ["a.example", "10.0.0.7"])
    before = contents(tmp_path)

    states = init_tls(tmp_path, renew=True)

    assert changed(before, tmp_path) == {"cert.pem", "key.pem", "client-cert.pem", "client-key.pem"}
    assert {path.name for path, state in states.items() if state == "kept"} == {
        "ca.pem",
        "ca-key.pem",
    }
    assert names_of(tmp_path / "cert.pem") == ["paramserver", "a.example", "10.0.0.7"]
    shake_hands(pair(tmp_path), pair(tmp_path, "client-"), "paramserver")

    init_tls(tmp_path, ["b.example"], renew=True)
    assert names_of(tmp_path / "cert.pem") == ["paramserver", "b.example"]


def test_what_a_killed_command_left_is_completed(tmp_path: Path) -> None:
    """Keys are written before certificates; each prefix of the files is completed."""
    order = [path.name for path in init_tls(tmp_path / "whole")]
    for number in range(len(order)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in order[:number]:
            (folder / name).write_bytes((tmp_path / "whole" / name).read_bytes())
            (folder / name).chmod(0o600)
        before = contents(folder)

        states = init_tls(folder)

        assert {path.name for path, state in states.items() if state == "written"} == {
            *order[number:]
        }
        assert changed(before, folder) == {*order[number:]}
        shake_hands(pair(folder), pair(folder, "client-"), "paramserver")


def test_the_authoritys_key_may_lie_elsewhere(tmp_path: Path) -> None:
    init_tls(tmp_path)
    (tmp_path / "ca-key.pem").unlink()

    assert set(init_tls(tmp_path).values()) == {"kept"}
    before = contents(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"ca-key\.pem is missing"):
        init_tls(tmp_path, renew=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("lost", "expected"), [("key.pem", "is missing"), ("client-key.pem", "is missing")]
)
def test_a_lost_key_needs_renew(lost: str, expected: str, tmp_path: Path) -> None:
    init_tls(tmp_path)
    (tmp_path / lost).unlink()

    with pytest.raises(InvalidRequestError, match=rf"{lost} .* {expected}. Try: `--renew`"):
        init_tls(tmp_path)
    init_tls(tmp_path, renew=True)
    shake_hands(pair(tmp_path), pair(tmp_path, "client-"), "paramserver")


def test_a_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    init_tls(tmp_path)
    (tmp_path / "ca-key.pem").write_text(key_pem(make_key()))

    with pytest.raises(InvalidRequestError, match="does not fit the CA file"):
        init_tls(tmp_path, renew=True)


def test_an_expired_authority_signs_nothing(tmp_path: Path) -> None:
    authority = new_authority(-9.0, -2.0)
    assert authority.key is not None
    (tmp_path / "ca.pem").write_text(certificate_pem(authority.certificate))
    (tmp_path / "ca-key.pem").touch(0o600)
    (tmp_path / "ca-key.pem").write_text(key_pem(authority.key))

    with pytest.raises(AuthenticationError, match="has expired"):
        init_tls(tmp_path)


def test_a_certificate_ends_with_its_authority(tmp_path: Path) -> None:
    authority = new_authority(-1.0, 9.0)
    assert authority.key is not None
    (tmp_path / "ca.pem").write_text(certificate_pem(authority.certificate))
    (tmp_path / "ca-key.pem").touch(0o600)
    (tmp_path / "ca-key.pem").write_text(key_pem(authority.key))
    init_tls(tmp_path)

    assert read_tls(pair(tmp_path)).expires == authority.certificate.not_valid_after_utc.timestamp()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(InvalidRequestError, match=r"cannot be made: .*Try: another DIR"):
        init_tls(tmp_path / "file" / "below")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").symlink_to(tmp_path / "missing" / "cert.pem")

    with pytest.raises(InvalidRequestError, match=r"cert\.pem cannot be written: No such file"):
        init_tls(tmp_path)


def test_a_certificate_needs_the_authoritys_key() -> None:
    authority = new_authority()._replace(key=None)
    now = datetime.now(UTC)

    with pytest.raises(InvalidRequestError, match=r"ca-key\.pem is missing"):
        make_certificate(authority, make_key(), ["a"], now, now + timedelta(days=1))
