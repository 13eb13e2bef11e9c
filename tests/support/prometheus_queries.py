"""PromQL queries of deploy/ with their names and labels."""

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
    """Return the dashboard that Grafana reads."""
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def dashboard_queries() -> list[Query]:
    """Return the panels' queries with Grafana's variables replaced."""
    return [
        Query(f"panel {panel['title']!r}", _plain(target["expr"]))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def annotation_queries() -> list[Query]:
    """Return the queries of annotations."""
    return [
        Query(f"annotation {each['name']!r}", _plain(each["expr"]))
        for each in dashboard()["annotations"]["list"]
    ]


def alert_queries() -> list[Query]:
    """Return the rules' expressions; alerts.yml has only one-line and folded (>-) expressions."""
    return [Query(f"alert {name}", _expr(body)) for name, body in _rules()]


def runbooks() -> dict[str, str]:
    """Return the runbook of each alert by its name."""
    return {
        name: found[1]
        for name, body in _rules()
        if (found := re.search(r'^ +runbook: "(.*)"$', body, re.M))
    }


def selectors(expr: str) -> set[str]:
    """Return the series that a query reads: names with their selected labels."""
    found = re.finditer(r"([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?", _GROUPING.sub(" ", expr))
    return {match[0] for match in found if match[1] in names(expr)}


def names(expr: str) -> set[str]:
    """Return metric names: identifiers outside strings, selectors, groupings and ranges."""
    bare = _GROUPING.sub(" ", re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", expr))
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - _KEYWORDS


def labels(expr: str) -> set[str]:
    """Return label names that a query selects or groups by."""
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expr)
    grouped = [
        label.strip() for group in _GROUPING.findall(expr) for label in group.split(",") if label
    ]
    return {*selected, *grouped}


def _rules() -> list[tuple[str, str]]:
    return re.findall(r"- alert: (\w+)\n(.*?)(?=\n\s*- alert:|\Z)", ALERTS.read_text(), re.S)


def _plain(expr: str) -> str:
    return expr.replace("$__rate_interval", "1m").replace("$shard", ".*")


def _expr(body: str) -> str:
    found = re.search(r"^\s+expr: (?:>-\n((?: {10,}.*\n)+)|(.*))", body, re.M)
    assert found, f"no expr in {body}"
    return " ".join((found[1] or found[2]).split())
