"""Commands of ps-ctl that change a running job: drain, policy, promote, reshard, scale, stop."""

import sys
from typing import TYPE_CHECKING

import click

from pscommon.core.limits import POLICIES, check_policy
from pscommon.security.credentials import use_environment
from pscommon.settings.values import ADDRESS, COUNT, COUNT_OR_NONE, TEXT
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import PROMOTE, call
from psproto.v1 import standby_pb2 as pb
from psworker.ctl.context import CommandContext, pass_settings, shared, waiting
from psworker.ctl.output import Table, show, show_fields, size

if TYPE_CHECKING:
    from psworker.ctl.job_client import CoordinatorClient

HANDOVER_SECONDS = 10.0
"""Maximum time of a handover from primary to standby."""


class CommandGroup(click.Group):
    """Group of commands that never suggests `stop` for a mistyped command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does; leave `stop` out of the suggestions."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            possibilities = getattr(error, "possibilities", None)
            if possibilities and stop.name in possibilities:
                error.possibilities = [name for name in possibilities if name != stop.name]  # type: ignore[attr-defined]
            raise


@click.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 drain 3")
@click.argument("worker", metavar="WORKER", type=COUNT)
@shared
@pass_settings
def drain(settings: CommandContext, worker: int) -> None:
    """Ask a worker to leave without losing data.

    WORKER is its number in `ps-ctl workers`. The worker ends its step, returns unused data,
    leaves the job and exits with 0. The other workers continue.
    """
    with settings.servers() as servers:
        servers.drain(worker)
    show_fields(
        settings.output, {"job": servers.described.job, "worker": worker, "state": "draining"}
    )


@click.group(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 scale workers 4")
def scale() -> None:
    """Change how many workers a running job wants."""


@scale.command(
    "workers",
    epilog="""\b
Examples:
  ps-ctl --ps host0:50051 scale workers 4
  ps-ctl scale workers 2                        your only job on this machine""",
)
@click.argument("count", metavar="WORKERS", type=COUNT)
@shared
@pass_settings
def scale_workers(settings: CommandContext, count: int) -> None:
    """Set the number of workers that the job wants.

    The servers start no machine. ps-run follows the number: it starts workers, or lets the newest
    ones leave as after `ps-ctl drain`, so no sample is lost. Elsewhere an autoscaler follows
    `workers_wanted` of `ps-ctl status --output json`, or the metric ps_workers_wanted.
    """
    with settings.servers() as servers:
        servers.scale_workers(count)
    show_fields(settings.output, {"job": servers.described.job, "workers_wanted": count})


@click.group(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 policy set async")
def policy() -> None:
    """Change the policy of a running job."""


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
    "--staleness",
    type=COUNT_OR_NONE,
    metavar="STEPS",
    help="ssp: maximum steps that a worker may be ahead of the slowest worker.",
)
@click.option(
    "--max-staleness",
    type=COUNT_OR_NONE,
    metavar="VERSIONS",
    help="Reject gradients that are more versions old than this [default: no limit].",
)
@shared
@pass_settings
def set_(
    settings: CommandContext, name: str, staleness: int | None, max_staleness: int | None
) -> None:
    """Set the policy of a running job, from its next update on.

    All workers start at the same clock: a lead under the old policy does not count. The new
    policy survives a rollback, and a restart of the servers from a later snapshot unless their
    --policy has changed.
    """
    check_policy(name, staleness)
    with settings.servers() as servers:
        servers.set_policy(name, staleness, max_staleness)
    document = {
        "job": servers.described.job,
        "policy": name,
        "staleness": staleness,
        "max_staleness": max_staleness,
    }
    show_fields(settings.output, document)


@click.command(epilog="\b\nExample:\n  ps-ctl promote host1:50061")
@click.argument("standby", type=ADDRESS, metavar="HOST:PORT")
@shared
@pass_settings
def promote(settings: CommandContext, standby: str) -> None:
    """Make a standby the primary of its shard.

    HOST:PORT is the address of the standby. A primary that answers hands over without loss and
    exits; a standby that is behind refuses. If the primary does not answer, the standby takes
    over with its own state and reports its version; with --failover-lock only if it gets the
    primary lease.
    """
    request, timeout = pb.PromoteRequest(), HANDOVER_SECONDS + settings.timeout
    request.wait_ms = round(HANDOVER_SECONDS * 1000)
    use_environment(settings.security)
    with open_channel(Endpoint(standby)) as channel:
        answer = call(channel, PROMOTE, request, timeout, f"the standby at {standby}")
    document = {
        "primary": standby,
        "term": answer.term,
        "version": answer.version,
        "note": answer.note,
    }
    show_fields(settings.output, document)


@click.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 reshard --servers 3")
@click.option(
    "--servers",
    "count",
    type=COUNT,
    required=True,
    metavar="SERVERS",
    help="Target number of servers.",
)
@waiting
@shared
@pass_settings
def reshard(settings: CommandContext, count: int, wait: float) -> None:
    """Change the number of servers of a running job.

    Workers pause and continue; no push is lost or applied twice. Start additional servers first,
    with `ps-server --shard I/N --join HOST:PORT` (address of shard 0); they wait for this
    command. Removed servers have the highest shard numbers and exit with 0. Shard 0 always
    stays.
    """
    with settings.servers() as servers:
        seconds, nbytes = servers.reshard(count, wait)
    document = {
        "job": servers.described.job,
        "servers": count,
        "pause_seconds": round(seconds, 3),
        "nbytes": nbytes,
    }
    rows = [
        ("job", document["job"]),
        ("servers", count),
        ("pause", f"{seconds:.2f} s"),
        ("moved", size(nbytes)),
    ]
    show(settings.output, document, lambda: [Table("", (), rows)])


@click.command(
    epilog="""\b
Examples:
  ps-ctl --ps host0:50051 stop --reason 'accurate enough'
  ps-ctl --ps host0:50051 stop --yes"""
)
@click.option(
    "--reason",
    type=TEXT,
    default="ps-ctl stop",
    show_default=True,
    help="Reason for the servers' logs.",
)
@click.option(
    "--yes",
    is_flag=True,
    help="Skip the confirmation, which only a terminal asks for.",
)
@shared
@pass_settings
def stop(settings: CommandContext, reason: str, yes: bool) -> None:
    """End the job.

    Workers finish their steps and exit with 0. Servers with a data directory take a last
    snapshot, then every server exits.
    """
    with settings.servers() as servers:
        if not yes and sys.stdin is not None and sys.stdin.isatty():
            _confirm(servers)
        servers.stop(reason)
    show_fields(settings.output, {"job": servers.described.job, "state": "stopping"})


def _confirm(servers: "CoordinatorClient") -> None:
    """Raise click.Abort unless the user types y."""
    status = servers.status()
    members = [
        row for row in status.get("workers", ()) if row.get("state") in ("joined", "active", "idle")
    ]
    workers = f"{len(members)} worker{'s' * (len(members) != 1)}"
    question = f"End job {servers.described.job} (version {status.get('version', 0)}, {workers})?"
    if not click.confirm(question, err=True):
        click.echo("ps-ctl: the job was not stopped", err=True)
        raise click.Abort
