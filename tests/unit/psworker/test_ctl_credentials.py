"""`ps-ctl tls init`, `ps-ctl token init`, and what `ps-ctl doctor` says about such files."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pscommon.security.tokens import init_tokens
from psworker.ctl import checks
from psworker.ctl.cli import main
from tests.support.certificates import write_files

Output = pytest.CaptureFixture[str]


def states(capsys: Output, *args: str) -> dict[str, str]:
    """Return the state of each file that a command reports."""
    assert main([*args, "--output", "json"]) == 0
    return {Path(row["file"]).name: row["state"] for row in json.loads(capsys.readouterr().out)}


def test_tls_init_names_new_and_existing_files(tmp_path: Path, capsys: Output) -> None:
    line = ("tls", "init", str(tmp_path / "new"))

    assert set(states(capsys, *line, "--host", "a.example").values()) == {"written"}
    assert set(states(capsys, *line).values()) == {"kept"}
    renewed = states(capsys, *line, "--renew")
    assert {name for name, state in renewed.items() if state == "kept"} == {"ca.pem", "ca-key.pem"}

    assert main(list(line)) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["file", "state"]
    assert [str(tmp_path / "new" / "cert.pem"), "kept"] in rows


def test_token_init_names_new_and_existing_files_and_no_token(
    tmp_path: Path, capsys: Output
) -> None:
    assert main(["token", "init", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  written\n") == 5
    tokens = [path.read_text().strip() for path in tmp_path.glob("*.token")]
    assert len(tokens) == 4
    assert not [token for token in tokens if token in shown]

    assert set(states(capsys, "token", "init", str(tmp_path)).values()) == {"kept"}


def test_an_invalid_host_is_a_usage_error(tmp_path: Path, capsys: Output) -> None:
    assert main(["tls", "init", str(tmp_path), "--host", "a:1"]) == 2
    assert "--host a:1 is neither" in capsys.readouterr().err


def doctor(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, *args: str, before: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Return state, text and remedy of each check; `before` are flags before the command."""
    monkeypatch.setattr(checks, "loopback", lambda: checks.Finding("ok", ""))
    main([*before, "doctor", *args, "--output", "json"])
    findings = json.loads(capsys.readouterr().out)
    return {row["check"]: [row["state"], row["text"], row["remedy"]] for row in findings}


def test_doctor_shows_names_and_dates(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_files(tmp_path, ["paramserver", "a.example"])
    monkeypatch.setenv("PS_TLS_CA", str(files.ca))
    monkeypatch.setenv("PS_TLS_CERT", "/of/the/environment")

    before = ("--tls-key", str(files.key), "--tls-cert", "/before")
    found = doctor(capsys, monkeypatch, "--tls-cert", str(files.cert), before=before)

    state, text, remedy = found["certificate"]
    assert (state, remedy) == ("ok", "")
    assert text.startswith("paramserver, a.example; valid from 20")
    assert text.count(" UTC") == 2


@pytest.mark.parametrize(
    ("end", "state", "text"), [(13.5, "warning", "valid from"), (-0.5, "problem", "has expired")]
)
def test_doctor_reports_the_end_of_a_certificate(
    end: float,
    state: str,
    text: str,
    tmp_path: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = write_files(tmp_path, end=end)
    flags = ("--tls-ca", str(files.ca), "--tls-cert", str(files.cert), "--tls-key", str(files.key))

    found = doctor(capsys, monkeypatch, *flags)["certificate"]

    assert found[0] == state
    assert text in found[1]
    assert "--renew" in found[2]


def test_doctor_checks_the_token_file(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_tokens(tmp_path)
    path = tmp_path / "tokens"
    flags = ("--token-file", str(path))
    assert doctor(capsys, monkeypatch, *flags)["token file"] == [
        "ok",
        "tokens of worker, server, admin, read",
        "",
    ]

    path.chmod(0o644)
    state, text, remedy = doctor(capsys, monkeypatch, *flags)["token file"]
    assert (state, remedy) == ("problem", f"`chmod 600 {path}`")
    assert "(mode 0644)" in text


def test_some_tls_options_without_the_others_are_a_usage_error(
    tmp_path: Path, capsys: Output
) -> None:
    assert main(["doctor", "--tls-ca", str(tmp_path / "ca.pem")]) == 2
    assert "`--tls-cert` and `--tls-key` must be set too" in capsys.readouterr().err


def test_without_files_doctor_checks_none(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not {"certificate", "token file"} & doctor(capsys, monkeypatch).keys()
