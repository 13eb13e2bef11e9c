"""Each alert of deploy/ names a section of the documentation, and a command that ps-ctl has."""

import re
import shlex

import click
import pytest

from psworker.ctl.cli import ps_ctl
from tests.support.documentation_pages import ROOT, anchors
from tests.support.prometheus_queries import alert_queries, runbooks

RUNBOOK = re.compile(r"(docs/operations/[\w-]+\.md)#([\w-]+): `ps-ctl (.+)`")


def parse(command: click.Command, words: list[str]) -> click.Context:
    """Return the context of the innermost command. Raise UsageError as the command would."""
    ctx = command.make_context(command.name, words)
    while isinstance(ctx.command, click.Group):
        name, found, rest = ctx.command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        assert found is not None
        ctx = found.make_context(name, rest, parent=ctx)
    return ctx


def test_every_alert_has_a_runbook() -> None:
    alerts = {query.where.removeprefix("alert ") for query in alert_queries()}

    assert alerts == runbooks().keys()


@pytest.mark.parametrize("alert", runbooks())
def test_a_runbook_names_a_section_and_a_command(alert: str) -> None:
    found = RUNBOOK.fullmatch(runbooks()[alert])
    assert found is not None, runbooks()[alert]
    page, anchor, line = found.groups()

    assert anchor in anchors(ROOT / page)
    # a port and a folder that can be parsed
    ctx = parse(ps_ctl, shlex.split(line.replace("HOST:PORT", "host:1").replace("DIR", ".")))
    assert not isinstance(ctx.command, click.Group)


@pytest.mark.parametrize("words", [["nothing"], ["status", "--nothing"], ["drain"]])
def test_a_wrong_command_is_found(words: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parse(ps_ctl, words)
