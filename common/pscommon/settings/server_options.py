"""Options of ps-server: its place, the job's policy, durability and failover."""

import click

from pscommon.settings import values
from pscommon.settings.command import Option
from pscommon.settings.option_types import (
    ADDRESS,
    COUNT,
    COUNT_OR_NONE,
    FAILOVER,
    FILE,
    FOLDER,
    JOB,
    LISTEN,
    PLACE,
    POLICIES,
    SECONDS,
    SNAPSHOTS,
    TEXT,
)
from pscommon.settings.values import ValueType

JOB_NAME = Option(
    "--job",
    section=JOB,
    type=TEXT,
    metavar="NAME",
    help="The job's name; servers make one up, workers take it.",
)

PLACEMENT = (
    Option(
        "--shard",
        section=PLACE,
        type=ValueType("I/N", values.shard),
        default="0/1",
        show_default=True,
        help="Which shard of how many this server is; one that the running job lacks waits for "
        "ps-ctl reshard.",
    ),
    Option(
        "--bind",
        section=PLACE,
        type=LISTEN,
        help="Listen here; port 0 picks a free one [default: 127.0.0.1:50051+I].",
    ),
    Option(
        "--advertise",
        section=PLACE,
        type=ADDRESS,
        help="What others are told to connect to [default: what is bound].",
    ),
    Option(
        "--join",
        section=PLACE,
        type=ADDRESS,
        help="Address of shard 0 [default: workers that list every server tell]; shard 0 ignores "
        "it.",
    ),
    Option(
        "--join-timeout",
        section=PLACE,
        type=SECONDS,
        default="300",
        show_default=True,
        help="Wait this long for the others.",
    ),
    Option("--port-file", section=PLACE, type=FILE, help="Write the bound port into this file."),
)

POLICY = (
    Option(
        "--policy",
        section=JOB,
        type=click.Choice(POLICIES),
        default="sync",
        show_default=True,
        help="sync: rounds of everybody; async: each push at once; ssp: at once, but nobody runs "
        "far ahead.",
    ),
    Option(
        "--staleness",
        section=JOB,
        type=COUNT_OR_NONE,
        help="ssp: steps that a worker may be ahead of the slowest.",
    ),
    Option(
        "--max-staleness",
        section=JOB,
        type=COUNT_OR_NONE,
        help="Refuse gradients computed more than this many versions ago [default: none].",
    ),
    Option(
        "--min-workers",
        section=JOB,
        type=COUNT,
        default=1,
        show_default=True,
        help="The first round waits for so many.",
    ),
    Option(
        "--lease",
        section=JOB,
        type=SECONDS,
        default="5",
        show_default=True,
        help="Silence after which a worker is dropped; one whose process has ended is dropped at "
        "once.",
    ),
    Option(
        "--progress-timeout",
        section=JOB,
        type=SECONDS,
        help="Drop a worker whose script makes no call for so long, though nothing keeps it "
        "waiting [default: never].",
    ),
    Option(
        "--on-worker-loss",
        section=JOB,
        type=ValueType("shrink|wait:SECONDS|abort", values.on_worker_loss),
        default="shrink",
        show_default=True,
        help="When a worker is lost: go on without it, keep its place for a while, or end.",
    ),
    Option(
        "--backup-workers",
        section=JOB,
        type=COUNT_OR_NONE,
        default=0,
        show_default=True,
        help="sync: so many of the slowest need not be waited for in a round.",
    ),
    Option(
        "--late-gradients",
        section=JOB,
        type=click.Choice(values.LATE_GRADIENTS),
        default="return",
        show_default=True,
        help="With --backup-workers: what becomes of the data of a gradient that came too late.",
    ),
    Option(
        "--global-batch",
        section=JOB,
        type=COUNT,
        help="sync: samples of one update, however many workers there are [default: one batch of "
        "each].",
    ),
    Option(
        "--bad-gradients",
        section=JOB,
        type=click.Choice(values.BAD_GRADIENTS),
        default="abort",
        show_default=True,
        help="With NaN or Inf, or above --max-norm: end the job, skip them, or clip (zeros for "
        "NaN, norm scaled down).",
    ),
    Option(
        "--max-norm",
        section=JOB,
        type=ValueType("NORM", values.positive, int, float),
        help="A gradient with a larger norm is bad [default: any].",
    ),
    Option(
        "--quarantine-after",
        section=JOB,
        type=COUNT,
        help="So many bad gradients in a row, and the worker is out [default: never].",
    ),
    JOB_NAME,
)

DURABILITY = (
    Option(
        "--data-dir",
        section=SNAPSHOTS,
        type=FOLDER,
        help="Where snapshots live; all shards share it [default: no snapshots].",
    ),
    Option(
        "--snapshot-every",
        section=SNAPSHOTS,
        type=ValueType("60s|10m|500steps", values.snapshot_every),
        help="How often [default with --data-dir: 60s].",
    ),
    Option(
        "--snapshot-keep",
        section=SNAPSHOTS,
        type=COUNT,
        default=3,
        show_default=True,
        help="So many stay, the newest.",
    ),
    Option(
        "--durability",
        section=SNAPSHOTS,
        type=click.Choice(values.DURABILITY),
        default="snapshot",
        show_default=True,
        help="log: each update is written down before it is acknowledged, so a server that dies "
        "loses none.",
    ),
    Option(
        "--log-fsync",
        section=SNAPSHOTS,
        type=click.Choice(values.LOG_FSYNC),
        default="everysec",
        show_default=True,
        help="When the log is forced to the disk, against power cuts; a process that dies loses "
        "nothing anyway.",
    ),
    Option(
        "--resume",
        section=SNAPSHOTS,
        type=ValueType("auto|never|VERSION", values.resume, int),
        default="auto",
        show_default=True,
        help="auto: from the newest valid snapshot, where there is one.",
    ),
    Option(
        "--save",
        section=SNAPSHOTS,
        type=FILE,
        help="Write the newest weights there at the end, as safetensors; on servers shard 0 does.",
    ),
)

EXIT_WHEN_DONE = Option(
    "--exit-when-done",
    section=JOB,
    is_flag=True,
    help="Stop once every worker that took part has finished.",
)

STANDBY = (
    Option(
        "--standby-of",
        section=FAILOVER,
        type=ADDRESS,
        help="Follow this shard's primary, and take its place when it dies [default: be primary].",
    ),
    Option(
        "--failover-lock",
        section=FAILOVER,
        type=FOLDER,
        help="Folder in which primaries and standbys settle who is primary [default: only ps-ctl "
        "promote does].",
    ),
    Option(
        "--shipping",
        section=FAILOVER,
        type=click.Choice(values.SHIPPING),
        default="sync",
        help="sync [default]: nothing is acknowledged before the standby has it; async: it may be "
        "behind.",
    ),
)
