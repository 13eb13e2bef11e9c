"""The settings for TLS and tokens: all commands and the environment of a script give the same."""

from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.security.settings import SecuritySettings, security_settings
from pscommon.security.tls_files import TlsFiles
from pscommon.settings import options
from psserver.process.config import ServerConfig
from psworker import cli
from psworker.ctl import context
from psworker.run.cli import COMMAND as RUN
from psworker.session.arguments import security_of
from tests.support.settings_coverage import server_setting, worker_setting

FILES = TlsFiles(Path("/a/ca.pem"), Path("/a/cert.pem"), Path("/a/key.pem"))
FLAGS = {
    "tls_ca": "/a/ca.pem",
    "tls_cert": "/a/cert.pem",
    "tls_key": "/a/key.pem",
    "token_file": "/a/tokens",
}
LINE = [word for key, path in FLAGS.items() for word in (f"--{key.replace('_', '-')}", path)]
ALL = SecuritySettings(FILES, Path("/a/tokens"), True)


@pytest.fixture(autouse=True)
def no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in options.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def parsed(table: str, *args: str) -> dict[str, Any]:
    return {setting.key: setting.value for setting in options.merged(table, args)}


@pytest.mark.parametrize("table", options.TABLES)
def test_every_command_has_the_options(table: str) -> None:
    assert security_settings(parsed(table)) == SecuritySettings()
    assert security_settings(parsed(table, *LINE, "--insecure")) == ALL


@server_setting("tls_ca", "tls_cert", "tls_key", "token_file", "insecure")
def test_a_server_gets_them() -> None:
    settings = parsed("server", *LINE, "--insecure")

    assert ServerConfig.from_settings(settings).security == ALL
    assert ServerConfig.from_settings(parsed("server")).security == SecuritySettings()


@worker_setting("tls_ca", "tls_cert", "tls_key", "token_file", "insecure")
def test_a_script_gets_them_from_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With absolute paths: a script may change its folder before it connects."""
    environ: dict[str, str] = {}
    monkeypatch.chdir(tmp_path)
    line = ["--tls-ca", "ca.pem", *LINE[2:], "--insecure", "--ps", "a:1", "--device", "cpu"]
    with cli.COMMAND.make_context("ps-worker", [*line, "x.py"]) as ctx:
        cli.export(ctx.params, environ)

    assert security_of(environ) == SecuritySettings(
        TlsFiles(tmp_path / "ca.pem", FILES.cert, FILES.key), Path("/a/tokens"), True
    )
    assert security_of({"PS_TLS_CA": "", "PS_TOKEN_FILE": ""}) == SecuritySettings()


@pytest.mark.parametrize("missing", ["tls_ca", "tls_cert", "tls_key"])
def test_tls_files_belong_together(missing: str) -> None:
    others = {key: Path(path) for key, path in FLAGS.items() if key != missing}

    with pytest.raises(InvalidRequestError) as caught:
        security_settings(others)

    assert caught.value.exit_code == 2
    assert f"`--{missing.replace('_', '-')}` must be set too" in str(caught.value)
    assert "Try: the files of `ps-ctl tls init DIR`" in str(caught.value)


def test_incomplete_tls_files_end_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    from psserver.cli import main as server
    from psworker.cli import main as worker
    from psworker.run.cli import main as run

    line = ["--tls-ca", "/a/ca.pem"]
    for main, args in ((server, []), (worker, ["--ps", "a:1", "x.py"]), (run, ["x.py"])):
        assert main([*line, *args]) == 2
        assert "must be set too" in capsys.readouterr().err


def test_ps_ctl_has_them() -> None:
    settings = context.CommandContext()
    settings.protection.update({key: Path(path) for key, path in FLAGS.items()}, insecure=True)

    assert settings.security == ALL
    assert {option.key for option in options.PROTECTION} == context.PROTECTION_KEYS


def test_ps_run_has_them() -> None:
    with RUN.make_context("ps-run", [*LINE, "--insecure", "x.py"]) as ctx:
        assert security_settings(ctx.params) == ALL
