"""Commands of ps-ctl that steer a running job: requests, output and errors."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError, SnapshotError
from psworker.ctl.cli import main
from tests.support.ctl_servers import STATUS, Cluster, serving

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(Cluster()) as cluster:
        yield cluster


def json_output(cluster: Cluster, capsys: Output, *args: str) -> Any:
    """Return the JSON that the command prints."""
    assert main(["--ps", cluster.address, *args, "--output", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def failure(cluster: Cluster, capsys: Output, code: int, *args: str) -> str:
    """Return stderr of a command that exits with this code and prints nothing to stdout."""
    assert main(["--ps", cluster.address, *args]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_drain_names_the_worker(cluster: Cluster, capsys: Output) -> None:
    assert json_output(cluster, capsys, "drain", "3") == {
        "job": "job-7",
        "worker": 3,
        "state": "draining",
    }
    assert cluster.drained == [3]


def test_drain_of_an_unknown_worker_lists_the_workers(cluster: Cluster, capsys: Output) -> None:
    cluster.error = InvalidRequestError("no worker 9 is here to be drained; here are: worker 3")

    assert "no worker 9 is here to be drained; here are: worker 3" in failure(
        cluster, capsys, 2, "drain", "9"
    )


def test_scale_sets_the_number_of_workers(cluster: Cluster, capsys: Output) -> None:
    assert json_output(cluster, capsys, "scale", "workers", "4") == {
        "job": "job-7",
        "workers_wanted": 4,
    }
    assert cluster.scaled == [4]


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_scale_refuses_what_is_no_number_of_workers(
    cluster: Cluster, capsys: Output, number: str
) -> None:
    assert main(["--ps", cluster.address, "scale", "workers", number]) == 2
    assert cluster.scaled == []


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        (["sync"], ("sync", None, None)),
        (["async"], ("async", None, None)),
        (["async", "--max-staleness", "20"], ("async", None, 20)),
        (["ssp", "--staleness", "0"], ("ssp", 0, None)),
        (["ssp", "--staleness", "3", "--max-staleness", "0"], ("ssp", 3, 0)),
    ],
)
def test_policy_set_requests_only_the_given_settings(
    cluster: Cluster, capsys: Output, args: list[str], asked: tuple[str, int | None, int | None]
) -> None:
    name, staleness, max_staleness = asked
    wanted = {
        "job": "job-7",
        "policy": name,
        "staleness": staleness,
        "max_staleness": max_staleness,
    }

    assert json_output(cluster, capsys, "policy", "set", *args) == wanted
    assert cluster.policies == [asked]


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (["ssp"], "policy ssp needs a bound. Try: `--staleness S`"),
        (["sync", "--staleness", "3"], "policy sync excludes `--staleness 3`"),
        (["fastest"], "'fastest' is not one of 'sync', 'async', 'ssp'"),
        (["ssp", "--staleness", "-1"], "'-1' is not a whole number"),
        ([], "Missing argument"),
    ],
)
def test_an_invalid_policy_is_a_usage_error(
    cluster: Cluster, capsys: Output, args: list[str], remedy: str
) -> None:
    assert remedy in failure(cluster, capsys, 2, "policy", "set", *args)
    assert cluster.policies == []


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("drain 99999999999999999999", "is not a whole number"),
        ("reshard --servers 99999999999", "is not a whole number"),
        ("policy set ssp --staleness 99999999999", "is not a whole number"),
        ("policy set async --max-staleness 99999999999", "is not a whole number"),
        ("snapshot restore 99999999999999999999", "is not a whole number"),
        ("snapshot save --wait 100000h", "longer than 1000h"),
        ("--timeout 99999999999 status", "longer than 1000h"),
    ],
)
def test_numbers_beyond_the_range_of_messages_are_usage_errors(
    cluster: Cluster, capsys: Output, args: str, text: str
) -> None:
    assert text in failure(cluster, capsys, 2, *args.split())


def test_a_reason_that_is_not_utf_8_is_a_usage_error(cluster: Cluster, capsys: Output) -> None:
    assert "is not UTF-8" in failure(cluster, capsys, 2, "stop", "--reason", "\udcff")


def test_the_largest_numbers_are_sent(cluster: Cluster, capsys: Output) -> None:
    json_output(cluster, capsys, "drain", "2147483647")
    json_output(cluster, capsys, "policy", "set", "ssp", "--staleness", "2147483647")
    json_output(cluster, capsys, "snapshot", "restore", "9223372036854775807", "--wait", "1000h")
    json_output(cluster, capsys, "--timeout", "1000h", "snapshot", "save", "--wait", "1000h")

    assert (cluster.drained, cluster.policies) == ([2147483647], [("ssp", 2147483647, None)])
    assert (cluster.restored, cluster.waits) == ([9223372036854775807], [3_600_000_000] * 2)


def test_restore_requests_the_version_and_waits(cluster: Cluster, capsys: Output) -> None:
    found = json_output(cluster, capsys, "snapshot", "restore", "100", "--wait", "1m")

    assert found == {"job": "job-7", "version": 100, "state": "restored"}
    assert (cluster.restored, cluster.waits) == ([100], [60_000])


def test_restore_of_an_unknown_version_exits_with_12(cluster: Cluster, capsys: Output) -> None:
    cluster.error = SnapshotError(
        "no snapshot of version 7 in /data/snapshots; there are [100]", "NO_SNAPSHOT"
    )

    text = failure(cluster, capsys, 12, "snapshot", "restore", "7")

    assert "NO_SNAPSHOT: no snapshot of version 7 in /data/snapshots; there are [100]" in text


@pytest.mark.parametrize(
    ("command", "cells"), [("workers", {"slow", "0.125"}), ("status", {"slow", "121"})]
)
def test_health_is_shown(cluster: Cluster, capsys: Output, command: str, cells: set[str]) -> None:
    assert main(["--ps", cluster.address, command]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "host-a:16" in line]

    assert set(row.split()) >= cells


@pytest.mark.parametrize("command", ["workers", "status"])
def test_draining_workers_are_shown(cluster: Cluster, capsys: Output, command: str) -> None:
    cluster.status["workers"] = [{**STATUS["workers"][0], "draining": True}]

    assert main(["--ps", cluster.address, command]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "host-a:16" in line]
    assert row.endswith("asked to leave")
