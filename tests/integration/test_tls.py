"""TLS between our processes: every lane, causes of a refusal, and files that are replaced."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pscommon.core.errors import AuthenticationError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.security.credentials import NONE, Credentials, use_credentials
from pscommon.security.tls import Tls
from pscommon.security.tls_files import CLIENT_NAME, SERVER_NAME, TlsFiles, TlsMaterial
from pscommon.settings.values import Lanes
from pscommon.wire.endpoint import Endpoint, listen_grpc
from pscommon.wire.metrics_port import show_expiry
from psserver.process.config import ServerConfig
from psserver.server import Server
from psworker import Client
from tests.support.certificates import new_authority, write_files
from tests.support.lanes import each_lane
from tests.support.ports import free_port
from tests.support.proxy import Proxy

AUTHORITY = new_authority()
SGD = OptimizerSettings("sgd", ({"lr": 1.0},))


def unchecked(files: TlsFiles, needs_name: str | None) -> TlsMaterial:
    """Read files that a process would not start with."""
    ca, cert, key = (path.read_bytes() for path in (files.ca, files.cert, files.key))
    return TlsMaterial(ca, cert, key, 0.0, ())


def make(folder: Path, **options: Any) -> Credentials:
    folder.mkdir()
    files = write_files(folder, **{"authority": AUTHORITY, **options})
    return Credentials(Tls(files, read=unchecked))


@contextmanager
def running(
    credentials: Credentials, lanes: Lanes = "auto", bind: str = "127.0.0.1:0", **settings: Any
) -> Iterator[Server]:
    """Yield a server; then this process has no credentials."""
    use_credentials(credentials)
    server = Server(ServerConfig(bind=bind, lanes=lanes, **settings))
    server.start()
    use_credentials(NONE)
    try:
        yield server
    finally:
        server.stop("test")
        server.close()
        use_credentials(None)


@each_lane
@pytest.mark.parametrize("size", [10, 500_000])
def test_a_step_over_tls(tmp_path: Path, lanes: Lanes, size: int) -> None:
    with running(make(tmp_path / "server"), lanes) as server:
        use_credentials(make(tmp_path / "client", names=[CLIENT_NAME]))
        with Client(server.address, lanes=lanes) as client:
            values = np.arange(size, dtype=np.float32)
            client.register({"w": values}, SGD)
            for _ in range(3):
                client.push_pull({"w": np.ones(size, np.float32)})
            assert (client.pull()["w"] == values - 3).all()


@pytest.mark.parametrize(
    ("server", "client", "problem"),
    [
        (None, {}, "does not use TLS, and this process does"),
        ({}, None, "uses TLS, and this process has no certificate"),
        ({"end": -0.5}, {}, r"has expired: it is valid from .* to .* UTC, and it is .* UTC here"),
        ({"begin": 1.0}, {}, r"is not valid yet: it is valid from .* to .*, and it is .* here"),
        ({"authority": new_authority()}, {}, "is not of the CA in"),
        ({"names": [CLIENT_NAME]}, {}, "lacks the DNS name paramserver"),
        ({}, {"end": -0.5}, "refuses the certificate"),
    ],
    ids=["plain server", "plain client", "expired", "early", "foreign CA", "name", "own expired"],
)
def test_the_cause_of_a_refusal(
    tmp_path: Path, server: dict[str, Any] | None, client: dict[str, Any] | None, problem: str
) -> None:
    of_server = NONE if server is None else make(tmp_path / "server", **server)
    with running(of_server) as started:
        of_client = NONE if client is None else make(tmp_path / "client", **client)
        use_credentials(of_client)
        with pytest.raises(AuthenticationError, match=problem) as refused:
            Client(started.address, connect_timeout=20.0)
        assert "Try: " in str(refused.value)


def replaced(folder: Path, **options: Any) -> None:
    """Replace the files of a folder one by one, as an operator does."""
    other = folder.with_name(f"{folder.name}-new")
    other.mkdir(exist_ok=True)
    write_files(other, **options)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (other / name).replace(folder / name)


def test_files_that_do_not_fit_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    tls = Tls(write_files(folder, authority=AUTHORITY), SERVER_NAME)
    before, context = tls.material, tls.server_context()
    certificate = (folder / "cert.pem").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    write_files(other, authority=AUTHORITY)

    (other / "cert.pem").replace(folder / "cert.pem")
    assert (tls.material, tls.generation) == (before, 0)
    assert tls.server_context() is context

    (other / "key.pem").replace(folder / "key.pem")
    assert tls.material.cert == (folder / "cert.pem").read_bytes() != certificate
    assert tls.generation == 1
    assert tls.server_context() is not context


def test_a_grpc_server_uses_files_that_another_thread_finds_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    tls = Tls(write_files(folder, authority=AUTHORITY))
    dynamic = Mock(wraps=grpc.dynamic_ssl_server_credentials)
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", dynamic)
    listen_grpc(Endpoint("127.0.0.1:0", Credentials(tls)), 1)
    _, fetch = dynamic.call_args.args
    replaced(folder, authority=AUTHORITY)

    def make(pairs: Any, ca: bytes) -> Any:
        made.side_effect = lambda pairs, ca: pairs
        replaced(folder, authority=AUTHORITY)
        tls.refreshed_generation()  # as a stream does in its own thread
        return pairs

    made = Mock(side_effect=make)
    monkeypatch.setattr(grpc, "ssl_server_certificate_configuration", made)
    assert fetch() != [(tls.material.key, tls.material.cert)]
    assert fetch() == [(tls.material.key, tls.material.cert)]
    assert fetch() is None


def test_an_expiry_is_shown_and_warned_of_once_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(write_files(tmp_path, end=10.0))
    registry = CollectorRegistry()
    show_expiry(registry, tls)
    times = iter([0.0, 9e3, 8e4, 9e4])
    start = time.time()
    ended = Mock(wait=Mock(side_effect=[False, False, False, False, True]))

    tls.watch(ended, now=lambda: start + next(times))

    warnings = [each for each in caplog.records if "certificate_expires" in each.getMessage()]
    assert len(warnings) == 2
    shown = registry.get_sample_value("ps_tls_certificate_expiry_timestamp_seconds")
    assert shown == tls.material.expires == pytest.approx(start + 10 * 86400, abs=60)


@pytest.mark.parametrize("is_new_client", [True, False])
def test_a_new_ca_on_both_sides_loses_no_push(tmp_path: Path, is_new_client: bool) -> None:
    """Workers use the new files when they connect again; until they have them, they retry."""
    with ExitStack() as resources:
        proxy = resources.enter_context(Proxy(bind := f"127.0.0.1:{free_port()}"))
        settings = {"bind": bind, "advertise": proxy.address}
        resources.enter_context(running(make(tmp_path / "server"), "grpc", **settings))
        use_credentials(make(tmp_path / "client"))
        client = resources.enter_context(Client(proxy.address, lanes="grpc", connect_timeout=30.0))
        client.register({"w": np.zeros(4, np.float32)}, SGD)
        assert client.push_pull({"w": np.ones(4, np.float32)}).version == 1
        new = new_authority()
        replaced(tmp_path / "server", authority=new)
        if is_new_client:
            replaced(tmp_path / "client", authority=new)
        else:
            timer = Timer(1.0, replaced, (tmp_path / "client",), {"authority": new})
            timer.start()
            resources.callback(timer.join)

        proxy.cut()
        for version in range(2, 5):
            assert client.push_pull({"w": np.ones(4, np.float32)}).version == version
        assert (client.pull()["w"] == -4).all()
