"""Tables of a status from a release that sends fewer or more values."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from psworker.ctl import views
from psworker.ctl.cli import main
from psworker.ctl.output import Table
from tests.support.ctl_servers import STATUS, Cluster, serving

REPORTED = {
    **STATUS,
    "candidates": [{"shard": 2, "shards": 3, "address": "10.0.0.2:50051"}],
    "servers": [
        {**server, "standby": "b:1", "standby_state": "in sync", "standby_behind": 3}
        for server in STATUS["servers"]
    ],
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value of the document."""
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in pairs:
        if isinstance(key, str):
            yield (*path, key)
        yield from paths(inner, (*path, key))


def changed(path: tuple[Any, ...], change: str) -> dict[str, Any]:
    document = copy.deepcopy(REPORTED)
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    if change == "null":
        inner[path[-1]] = None
    else:
        del inner[path[-1]]
    return document


def all_tables(document: dict[str, Any]) -> list[Table]:
    return [
        *views.status(document),
        views.workers(document),
        views.snapshots(views.rows(document, "snapshots")),
    ]


@pytest.mark.parametrize("change", ["null", "absent"])
@pytest.mark.parametrize("path", list(paths(REPORTED)), ids=lambda path: ".".join(map(str, path)))
def test_missing_values_are_empty_cells(path: tuple[Any, ...], change: str) -> None:
    cells = [
        str(cell)
        for table in all_tables(changed(path, change))
        for row in table.rows
        for cell in row
        if cell is not None
    ]

    assert not [cell for cell in cells if "None" in cell]


def test_unknown_keys_change_nothing() -> None:
    new = copy.deepcopy(REPORTED)
    for row in (
        new,
        *new["servers"],
        *new["workers"],
        *new["data"],
        *new["snapshots"],
        *new["candidates"],
        new["model"],
    ):
        row["weather"] = {"fine": True}

    assert all_tables(new) == all_tables(REPORTED)


@pytest.mark.parametrize("status", [{}, dict.fromkeys(STATUS)], ids=["nothing", "only null"])
@pytest.mark.parametrize("command", ["status", "workers", "plan", "snapshot list"])
def test_commands_accept_an_empty_status(
    command: str, status: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Cluster(status=status)) as cluster:
        for output in ("table", "json"):
            assert main(["--ps", cluster.address, *command.split(), "--output", output]) == 0
    assert "None" not in capsys.readouterr().out


def test_json_is_the_unformatted_answer_of_the_servers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = {**STATUS, "pushes": [1, 2], "metrics": "none yet", "seconds": "long"}
    with serving(Cluster(status=odd)) as cluster:
        assert main(["--ps", cluster.address, "status", "--output", "json"]) == 0

    assert json.loads(capsys.readouterr().out) == odd


def test_status_shows_learning_rates_and_gradient_norms() -> None:
    """Each rate once; names only with several optimizers."""
    one = {"optimizer": "", "gradient_norm": 0.75, "learning_rates": [0.1, None, 0.1, 0.01]}
    several = [{**one, "optimizer": "a"}, {"optimizer": "b", "learning_rates": [0.5]}]

    assert dict(views.status({"optimizers": [one]})[0].rows) == {
        "learning rate": "0.1, 0.01",
        "gradient norm": "0.75",
    }
    assert dict(views.status({"optimizers": several})[0].rows) == {
        "learning rate": "a: 0.1, 0.01, b: 0.5",
        "gradient norm": "a: 0.75",
    }
