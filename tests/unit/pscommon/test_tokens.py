"""Token files: their form, what a role may do, and changes while the process runs."""

import logging
import os
from pathlib import Path

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.security import tokens as tokens_module
from pscommon.security.tokens import (
    ROLES,
    Role,
    TokenFile,
    includes,
    init_tokens,
    read_tokens,
    role_of,
    token_for,
)

WORKER, SERVER, ADMIN, READ = (f"{role}-{'x' * 16}" for role in ROLES)
ALL = tuple(zip(ROLES, (WORKER, SERVER, ADMIN, READ), strict=True))


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """Replace a file as an operator does, so that it is a new one."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    temporary.chmod(mode)
    return temporary.replace(path)


def problem(path: Path) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read_tokens(path)
    assert (caught.value.exit_code, str(caught.value).count("Try: ")) == (2, 1)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_has_roles_and_tokens(tmp_path: Path) -> None:
    text = f"# all roles\n\nworker {WORKER}\r\n  worker\t{SERVER}  \nadmin {ADMIN}"
    path = write(tmp_path / "tokens", text)

    assert read_tokens(path) == (("worker", WORKER), ("worker", SERVER), ("admin", ADMIN))


@pytest.mark.parametrize("role", ROLES)
def test_a_file_named_after_a_role_has_only_the_token(role: Role, tmp_path: Path) -> None:
    assert read_tokens(write(tmp_path / f"{role}.token", f"{WORKER}\n")) == ((role, WORKER),)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tokens", "", "is empty"),
        ("tokens", "# nothing\n\n", "is empty"),
        ("read.token", "\n", "is empty"),
        ("tokens", f"root {ADMIN}", "line 1 of the token file"),
        ("tokens", f"root {ADMIN}", "unknown role"),
        ("tokens", f"\nadmin {ADMIN} x", "line 2 of the token file"),
        ("tokens", "admin", "no single token"),
        ("tokens", f"admin {ADMIN}\u00e9", "no single token of printable ASCII"),
        ("tokens", "admin 123456789012345", "15 characters. Try: at least 16"),
        ("read.token", "123456789012345", "15 characters. Try: at least 16"),
        ("root.token", ADMIN, "unknown role"),
        ("read.token", f"{READ}\n{ADMIN}\n", "several lines"),
        ("read.token", f"read {READ}\n", "no single token"),
        ("tokens", f"read {READ}\nadmin {READ}\n", "the same token for two roles"),
    ],
)
def test_an_invalid_file_is_refused(name: str, text: str, expected: str, tmp_path: Path) -> None:
    assert expected in problem(write(tmp_path / name, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "is missing" in problem(tmp_path / "tokens")


def test_messages_never_contain_a_token(tmp_path: Path) -> None:
    """Not even if role and token are exchanged."""
    for text in (f"{ADMIN} admin", f"admin {ADMIN} {WORKER}", f"{ADMIN}\n", "admin secret"):
        found = problem(write(tmp_path / "tokens", text))
        assert not [word for word in (ADMIN, WORKER, "secret") if word in found]


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620])
def test_a_file_that_others_can_use_is_refused(mode: int, tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", f"admin {ADMIN}\n", mode)

    assert f"(mode {mode:04o})" in problem(path)


def test_admin_includes_all_and_read_is_included_in_all() -> None:
    allowed = {role: {needed for needed in ROLES if includes(role, needed)} for role in ROLES}

    assert allowed == {
        "worker": {"worker", "read"},
        "server": {"server", "read"},
        "admin": set(ROLES),
        "read": {"read"},
    }


@pytest.mark.parametrize(
    ("tokens", "role", "sent"),
    [
        (ALL, "worker", WORKER),
        (ALL, "admin", ADMIN),
        (ALL, "read", READ),
        ((("worker", WORKER), ("worker", SERVER)), "worker", WORKER),
        ((("read", READ), ("admin", ADMIN)), "worker", ADMIN),
        ((("worker", WORKER),), "read", WORKER),
        # the server says that the role does not allow it
        ((("worker", WORKER),), "admin", WORKER),
        ((("read", READ),), "worker", READ),
    ],
)
def test_a_client_sends_the_token_of_its_role(
    tokens: tokens_module.Tokens, role: Role, sent: str
) -> None:
    assert token_for(tokens, role) == sent


def test_a_token_has_a_role() -> None:
    assert [role_of(ALL, token) for _, token in ALL] == list(ROLES)
    unknown = ("", "x", WORKER[:-1], WORKER + "x", "\u00e9\ud800")
    assert {role_of(ALL, text) for text in unknown} == {None}


def test_every_token_is_compared_without_an_early_end(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(own: bytes, sent: bytes) -> bool:
        compared.append(own)
        return own == sent

    monkeypatch.setattr(tokens_module.hmac, "compare_digest", compare)

    assert role_of(ALL, WORKER) == "worker"
    assert compared == [token.encode() for _, token in ALL]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of token files."""
    now = [100.0]
    monkeypatch.setattr(tokens_module.time, "monotonic", lambda: now[0])
    return now


def test_a_changed_file_is_read_again_within_a_second(tmp_path: Path, seconds: list[float]) -> None:
    path = write(tmp_path / "tokens", f"worker {WORKER}\n")
    file = TokenFile(path)
    write(path, f"admin {ADMIN}\n")

    seconds[0] += 0.9
    assert file.tokens() == (("worker", WORKER),)
    seconds[0] += 0.2
    assert file.tokens() == (("admin", ADMIN),)


def test_a_broken_file_keeps_the_tokens_and_is_logged_once(
    tmp_path: Path, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "tokens", f"worker {WORKER}\n")
    file = TokenFile(path)
    caplog.set_level(logging.INFO)

    def tokens_later() -> tokens_module.Tokens:
        seconds[0] += 2.0
        return file.tokens()

    def events() -> list[str]:
        found = [record.msg.key for record in caplog.records]  # type: ignore[attr-defined]
        caplog.clear()
        return found

    write(path, "admin short\n")
    assert [tokens_later() for _ in range(3)] == [(("worker", WORKER),)] * 3
    assert events() == ["token_file_invalid"]

    path.unlink()
    assert [tokens_later() for _ in range(3)] == [(("worker", WORKER),)] * 3
    assert events() == []  # another file may take its place

    write(path, f"admin {ADMIN}\n", 0o644)
    assert tokens_later() == (("worker", WORKER),)
    path.chmod(0o600)
    assert tokens_later() == (("admin", ADMIN),)
    assert events() == ["token_file_invalid", "token_file_read"]
    assert ADMIN not in caplog.text


def test_a_token_file_that_cannot_be_read_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        TokenFile(tmp_path / "tokens")


def test_init_makes_a_token_of_each_role(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "tokens"
    names = ["tokens", *(f"{role}.token" for role in ROLES)]

    states = init_tokens(folder)

    assert {path.name: state for path, state in states.items()} == dict.fromkeys(names, "written")
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in states} == {0o600}
    made = read_tokens(folder / "tokens")
    assert [role for role, _ in made] == list(ROLES)
    assert made == tuple(read_tokens(folder / f"{role}.token")[0] for role in ROLES)
    assert len({token for _, token in made}) == 4
    assert min(len(token) for _, token in made) >= 43  # 32 bytes in base64


def test_init_keeps_what_exists(tmp_path: Path) -> None:
    init_tokens(tmp_path)
    before = {path: path.read_text() for path in tmp_path.iterdir()}

    assert set(init_tokens(tmp_path).values()) == {"kept"}
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("lost", ["tokens", "read.token"])
def test_init_makes_a_lost_file_that_fits_the_others(lost: str, tmp_path: Path) -> None:
    init_tokens(tmp_path)
    before = (tmp_path / lost).read_text()
    (tmp_path / lost).unlink()

    states = init_tokens(tmp_path)

    assert [path.name for path, state in states.items() if state == "written"] == [lost]
    assert (tmp_path / lost).read_text() == before


def test_init_makes_no_file_of_a_role_that_the_servers_do_not_know(tmp_path: Path) -> None:
    write(tmp_path / "tokens", f"admin {ADMIN}\n")

    assert {path.name for path in init_tokens(tmp_path)} == {"tokens", "admin.token"}
    assert os.listdir(tmp_path).count("worker.token") == 0


def test_init_refuses_an_invalid_file(tmp_path: Path) -> None:
    write(tmp_path / "worker.token", "short\n")

    with pytest.raises(InvalidRequestError, match="5 characters"):
        init_tokens(tmp_path)
