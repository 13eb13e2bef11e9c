"""`ps-ctl policy ...`: of a running job."""

import click

from pscommon.settings.option_types import COUNT_OR_NONE, POLICIES
from psworker.ctl.context import CommandContext, pass_settings, shared
from psworker.ctl.output import Table, show


@click.group(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 policy set async")
def policy() -> None:
    """Change when pushes count."""


@policy.command(
    "set",
    epilog="""\b
Examples:
  ps-ctl --ps host0:50051 policy set sync
  ps-ctl --ps host0:50051 policy set async --max-staleness 20
  ps-ctl --ps host0:50051 policy set ssp --staleness 3""",
)
@click.argument("name", type=click.Choice(POLICIES), metavar="|".join(POLICIES))
@click.option(
    "--staleness", type=COUNT_OR_NONE, help="ssp: steps that a worker may be ahead of the slowest."
)
@click.option(
    "--max-staleness",
    type=COUNT_OR_NONE,
    help="Refuse gradients computed more than this many versions ago [default: none].",
)
@shared
@pass_settings
def set_(
    settings: CommandContext, name: str, staleness: int | None, max_staleness: int | None
) -> None:
    """Give a running job another policy from its next update on.

    All workers start level: what the old policy let some of them be ahead does not count. It
    stays when the servers go back to a snapshot or are started again on one that was taken
    since, unless their --policy is another then.
    """
    if (name == "ssp") != (staleness is not None):
        raise click.UsageError(
            "--staleness S goes with ssp, and ssp needs it: policy set ssp --staleness 3"
        )
    with settings.servers() as servers:
        servers.set_policy(name, staleness, max_staleness)
    document = {
        "job": servers.described.job,
        "policy": name,
        "staleness": staleness,
        "max_staleness": max_staleness,
    }
    show(
        settings.output,
        document,
        lambda: [Table("", (), [row for row in document.items() if row[1] is not None])],
    )
