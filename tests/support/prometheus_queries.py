"""Every PromQL query that deploy/ ships, and what names and labels each uses."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/paramserver.json"
ALERTS = DEPLOY / "alerts.yml"

_KEYWORDS = {
    "and",
    "or",
    "unless",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "bool",
    "offset",
}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


class Query(NamedTuple):
    where: str
    expr: str


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def dashboard_queries() -> list[Query]:
    """The panels' queries, with Grafana's own variables replaced by what they stand for."""
    return [
        Query(f"panel {panel['title']!r}", _plain(target["expr"]))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def annotation_queries() -> list[Query]:
    """The queries that draw vertical lines."""
    return [
        Query(f"annotation {each['name']!r}", _plain(each["expr"]))
        for each in dashboard()["annotations"]["list"]
    ]


def alert_queries() -> list[Query]:
    """The rules' expressions; alerts.yml keeps to one-line and folded (>-) ones, so no YAML
    parser is needed.
    """
    rules = re.findall(r"- alert: (\w+)\n(.*?)(?=\n\s*- alert:|\Z)", ALERTS.read_text(), re.S)
    return [Query(f"alert {name}", _expr(body)) for name, body in rules]


def names(expr: str) -> set[str]:
    """Metric names of a query: identifiers outside strings, selectors, groupings and ranges that
    are no function.
    """
    bare = _GROUPING.sub(" ", re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", expr))
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - _KEYWORDS


def labels(expr: str) -> set[str]:
    """Label names that a query selects or groups by."""
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expr)
    grouped = [
        label.strip() for group in _GROUPING.findall(expr) for label in group.split(",") if label
    ]
    return {*selected, *grouped}


def _plain(expr: str) -> str:
    return expr.replace("$__rate_interval", "1m").replace("$shard", ".*")


def _expr(body: str) -> str:
    found = re.search(r"^\s+expr: (?:>-\n((?: {10,}.*\n)+)|(.*))", body, re.M)
    assert found, f"no expr in {body}"
    return " ".join((found[1] or found[2]).split())
