"""Queries of dashboard and alerts use existing metrics; a wrong name would silently show
nothing.
"""

import re
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from pscommon.security.tls import Tls
from pscommon.telemetry.http import new_registry
from pscommon.tracing.recorder import SpanRecorder
from pscommon.tracing.spans import SHARD_PHASES
from pscommon.wire.metrics_port import show_expiry
from psserver.process.metrics import ServerMetrics, standby_metrics
from psworker.session.metrics import WorkerMetrics
from tests.support import prometheus_queries as queries
from tests.support.certificates import write_files
from tests.support.prometheus_queries import DEPLOY, Query

ALL = [*queries.dashboard_queries(), *queries.annotation_queries(), *queries.alert_queries()]
SCRAPED = {"up": {"job", "instance"}}  # what Prometheus adds itself


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return all series names of server, standby and worker, with their labels and those of a
    scrape.
    """
    series: dict[str, set[str]] = dict(SCRAPED)
    tls = Tls(write_files(tmp_path_factory.mktemp("tls")))
    for registry in (server(), standby_metrics(0, lambda: 1), worker()):
        show_expiry(registry, tls)
        for family in registry.collect():
            for sample in family.samples:
                series.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return series


def server() -> CollectorRegistry:
    """Create server metrics in which everything has happened once."""
    registry = new_registry()
    metrics = ServerMetrics(registry, shard=0)
    metrics.show_shard(lambda: {"shards": "2", "job": "otter", "policy": "sync"})
    metrics.show_goodput(lambda: {"samples": 1.0, "seconds": None})
    metrics.show_phases(SpanRecorder(measured=SHARD_PHASES))
    metrics.set_workers({"active": 1})
    metrics.set_worker(1, clock=1, has_pushed=True)
    metrics.record_call("Exchange", "OK", 0.1)
    return registry


def worker() -> CollectorRegistry:
    """Create worker metrics with one reported value."""
    registry = new_registry()
    WorkerMetrics(registry).reported("loss", 1.0)
    return registry


@pytest.mark.parametrize("query", ALL, ids=lambda query: query.where)
def test_every_metric_and_label_in_a_query_exists(
    query: Query, series: dict[str, set[str]]
) -> None:
    """The names come from real metric objects, not from a list."""
    used = queries.names(query.expr)

    assert used, "a query without a metric"
    assert used <= series.keys()
    assert queries.labels(query.expr) <= set().union(*(series[name] for name in used))


def test_every_metric_is_shown_in_a_panel(series: dict[str, set[str]]) -> None:
    """A metric without a panel is missing there or superfluous."""
    shown = set().union(*(queries.names(query.expr) for query in ALL))
    families = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in series if name.startswith("ps_")
    }
    watched = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    unwatched = {name for name in families if not name.endswith("_created")} - watched

    assert unwatched == {"ps_build_info", "ps_parameters"}


@pytest.mark.parametrize(
    ("expr", "names", "labels"),
    [
        ('sum by (le, job) (rate(a_bucket{x=~"y"}[5m])) > 1', {"a_bucket"}, {"le", "job", "x"}),
        ("a == 0 and on (job) max by (job) (b) == 1", {"a", "b"}, {"job"}),
        ("time() - (a_seconds > 0)", {"a_seconds"}, set()),
    ],
)
def test_query_parser_returns_names_and_labels(
    expr: str, names: set[str], labels: set[str]
) -> None:
    """Functions and keywords are not names."""
    assert queries.names(expr) == names
    assert queries.labels(expr) == labels


def test_selectors_are_names_with_their_labels() -> None:
    expr = 'sum by (job) (rate(a_total{b="c"}[5m])) > 0 and on (job) d == 1'

    assert queries.selectors(expr) == {'a_total{b="c"}', "d"}


def test_dashboard_panels_have_unique_ids_and_do_not_overlap() -> None:
    """They fit the grid of 24 columns."""
    panels = queries.dashboard()["panels"]
    cells = Counter(
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    )

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert max(x for x, _ in cells) < 24
    assert set(cells.values()) == {1}
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        "Training",
        "Duration of a step",
        "Staleness and policy",
        "Servers",
        "Durability",
        "Errors",
    ]


def test_dashboard_uses_the_provisioned_datasource() -> None:
    """Grafana would otherwise show "datasource not found"."""
    provisioned = re.findall(
        r"^\s+uid: (\w+)",
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text(),
        re.M,
    )
    document = queries.dashboard()
    users = [panel for panel in document["panels"] if panel["type"] != "row"]
    users += [target for panel in users for target in panel["targets"]]
    users += document["templating"]["list"] + document["annotations"]["list"]

    assert {user["datasource"]["uid"] for user in users} == set(provisioned)
