"""Which servers ps-ctl asks, by addresses, environment and answers of servers."""

import os
from collections.abc import Iterator

import pytest

from psworker.ctl.cli import main
from tests.support.ctl_servers import Cluster, serving


@pytest.fixture(autouse=True)
def _no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(Cluster()) as cluster:
        yield cluster


Output = pytest.CaptureFixture[str]


def test_any_server_leads_to_shard_0(cluster: Cluster, capsys: Output) -> None:
    with serving(Cluster(shard=1, coordinator=cluster.address)) as other:
        assert main(["--ps", other.address, "stop"]) == 0

        assert (cluster.stopped, other.stopped) == (["ps-ctl stop"], [])


def test_one_answering_address_is_sufficient(cluster: Cluster) -> None:
    assert main(["--ps", f"127.0.0.1:1,{cluster.address}", "status"]) == 0


def test_other_addresses_are_tried_if_shard_0_does_not_answer(
    cluster: Cluster, capsys: Output
) -> None:
    """Its standby may have taken over just now."""
    with serving(Cluster(shard=1, coordinator="127.0.0.1:1")) as behind:
        assert main(["--ps", f"{behind.address},{cluster.address}", "status"]) == 0
        capsys.readouterr()
        assert main(["--ps", behind.address, "status"]) == 20

    assert "the server at 127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_a_shard_without_the_address_of_shard_0_is_reported(capsys: Output) -> None:
    with serving(Cluster(shard=1)) as lonely:
        assert main(["--ps", lonely.address, "status"]) == 20

    assert "is shard 1 and does not know the address of shard 0 yet" in capsys.readouterr().err


def test_an_unreachable_server_is_reported_in_one_line(capsys: Output) -> None:
    assert main(["--ps", "127.0.0.1:1", "status"]) == 20
    error = capsys.readouterr().err
    assert "UNREACHABLE: the server at 127.0.0.1:1 does not answer" in error
    assert error.count("\n") == 1


def test_a_server_that_does_not_answer_is_reported_after_the_timeout(
    cluster: Cluster, capsys: Output
) -> None:
    cluster.hang.clear()

    assert main(["--timeout", "200ms", "--ps", cluster.address, "status"]) == 20
    assert f"the server at {cluster.address} did not answer in time" in capsys.readouterr().err


def test_a_missing_server_address_is_a_usage_error(capsys: Output) -> None:
    assert main(["status"]) == 2
    assert "`--ps HOST:PORT` is missing" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["PS_SERVERS", "PS_PS"])
def test_a_flag_takes_precedence_over_the_servers_of_the_environment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Output, variable: str
) -> None:
    monkeypatch.setenv(variable, cluster.address)
    assert main(["status"]) == 0
    monkeypatch.setenv(variable, "127.0.0.1:1")
    assert main(["status"]) == 20
    assert main(["--ps", cluster.address, "status"]) == 0
    assert main(["status", "--ps", cluster.address]) == 0
