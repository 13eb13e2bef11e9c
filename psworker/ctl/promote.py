"""`ps-ctl promote`: another server for a shard, without a restart."""

import click

from pscommon.settings.option_types import ADDRESS
from pscommon.wire.channel import open_channel
from pscommon.wire.status import translated
from psproto.v1 import standby_pb2 as pb
from psproto.v1.standby_pb2_grpc import StandbyServiceStub
from psworker.ctl.context import CommandContext, pass_settings, shared
from psworker.ctl.output import Table, show

HANDOVER = 10.0
"""Seconds that a handover may take."""


@click.command(epilog="\b\nExample:\n  ps-ctl promote host1:50061")
@click.argument("standby", type=ADDRESS, metavar="HOST:PORT")
@shared
@pass_settings
def promote(settings: CommandContext, standby: str) -> None:
    """Make a standby the primary of its shard.

    HOST:PORT is the standby's. A primary that answers hands over, with nothing lost, and ends; a standby that is behind
    refuses. Where the primary does not answer the standby goes on with what it has, and says from which version; with
    --failover-lock only if the lock allows it.
    """
    with open_channel(standby) as channel, translated(f"the standby at {standby}"):
        request = pb.PromoteRequest(wait_ms=round(HANDOVER * 1000))
        answer = StandbyServiceStub(channel).Promote(request, timeout=HANDOVER + settings.timeout)
    document = {
        "primary": standby,
        "term": answer.term,
        "version": answer.version,
        "note": answer.note,
    }
    show(
        settings.output,
        document,
        lambda: [Table("", (), [row for row in document.items() if row[1] != ""])],
    )
