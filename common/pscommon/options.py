"""The options of every command, declared once: the commands, `ps-ctl config` and the check of files all read these."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from pscommon import values
from pscommon.config import Command, Option, Setting, sources
from pscommon.values import Value

POLICIES = ("sync", "async", "ssp")
COUNT = Value("INTEGER", values.count, int)
COUNT_OR_NONE = Value("INTEGER", values.count_or_none, int)
VERSION = Value("INTEGER", values.version, int)
FOLDER = values.Place(file_okay=False)
FILE = values.Place(dir_okay=False)
SECONDS = Value("SECONDS", values.seconds, int, float)
LISTEN = Value("HOST:PORT", values.listening)
ADDRESS = Value("HOST:PORT", values.address)
TEXT = Value("TEXT", values.utf8)

PLACE = "Place"
JOB = "Job"
SNAPSHOTS = "Snapshots"
FAILOVER = "Failover"
LOCAL = "This process"
OUTPUT = "Output"
CLUSTER = "Cluster"

LOGGING = (
    Option(
        "--log-level",
        section=OUTPUT,
        type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
        default="info",
        show_default=True,
        help="Least level that is logged.",
    ),
    Option(
        "--log-format",
        section=OUTPUT,
        type=click.Choice(["auto", "text", "json"]),
        default="auto",
        show_default=True,
        help="auto: text on a terminal, JSON when piped.",
    ),
)

JOB_NAME = Option(
    "--job", section=JOB, type=TEXT, metavar="NAME", help="The job's name; servers make one up, workers take it."
)

THREADS = Option(
    "--threads",
    section=LOCAL,
    type=COUNT,
    help="Threads that compute [default: a server's cores, 4 at most; torch decides for a worker].",
)

METRICS_BIND = Option(
    "--metrics-bind",
    section=LOCAL,
    type=LISTEN,
    help="Serve Prometheus /metrics, /livez and /readyz here [default: off].",
)

LANES = Option(
    "--lanes",
    section=LOCAL,
    type=click.Choice(values.LANES),
    default="auto",
    show_default=True,
    help="How tensors move: shm through memory that both share, grpc over the network; auto: shm on one host.",
)

OVERLAP = Option(
    "--overlap",
    section=LOCAL,
    type=click.Choice(("off", "on")),
    default="off",
    show_default=True,
    help="on: gradients leave during backward, forward waits for weights layer by layer (see Job.optimizer).",
)

MALLOC = Option(
    "--malloc",
    section=LOCAL,
    type=click.Choice(values.MALLOC),
    default="tuned",
    show_default=True,
    help="tuned: this process keeps freed memory for its next large buffers; system: glibc's own settings.",
)

IN_FLIGHT = Option(
    "--in-flight",
    section=LOCAL,
    type=Value("BYTES", values.nbytes, int, float),
    help="Bound on bytes of pushes and pulls that a server holds, 2GiB say [default: half of the memory].",
)

PLACEMENT = (
    Option(
        "--shard",
        section=PLACE,
        type=Value("I/N", values.shard),
        default="0/1",
        show_default=True,
        help="Which shard of how many this server is; one that the running job lacks waits for ps-ctl reshard.",
    ),
    Option(
        "--bind", section=PLACE, type=LISTEN, help="Listen here; port 0 picks a free one [default: 127.0.0.1:50051+I]."
    ),
    Option(
        "--advertise", section=PLACE, type=ADDRESS, help="What others are told to connect to [default: what is bound]."
    ),
    Option(
        "--join",
        section=PLACE,
        type=ADDRESS,
        help="Address of shard 0 [default: workers that list every server tell]; shard 0 ignores it.",
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
        help="sync: rounds of everybody; async: each push at once; ssp: at once, but nobody runs far ahead.",
    ),
    Option(
        "--staleness", section=JOB, type=COUNT_OR_NONE, help="ssp: steps that a worker may be ahead of the slowest."
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
        help="A worker silent for so long is dropped.",
    ),
    Option(
        "--on-worker-loss",
        section=JOB,
        type=Value("shrink|wait:SECONDS|abort", values.on_worker_loss),
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
        help="sync: samples of one update, however many workers there are [default: one batch of each].",
    ),
    Option(
        "--bad-gradients",
        section=JOB,
        type=click.Choice(values.BAD_GRADIENTS),
        default="abort",
        show_default=True,
        help="With NaN or Inf, or above --max-norm: end the job, skip them, or clip (zeros for NaN, norm scaled down).",
    ),
    Option(
        "--max-norm",
        section=JOB,
        type=Value("NORM", values.positive, int, float),
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
        type=Value("60s|10m|500steps", values.snapshot_every),
        help="How often [default with --data-dir: 60s].",
    ),
    Option(
        "--snapshot-keep", section=SNAPSHOTS, type=COUNT, default=3, show_default=True, help="So many stay, the newest."
    ),
    Option(
        "--durability",
        section=SNAPSHOTS,
        type=click.Choice(values.DURABILITY),
        default="snapshot",
        show_default=True,
        help="log: each update is written down before it is acknowledged, so a server that dies loses none.",
    ),
    Option(
        "--log-fsync",
        section=SNAPSHOTS,
        type=click.Choice(values.LOG_FSYNC),
        default="everysec",
        show_default=True,
        help="When the log is forced to the disk, against power cuts; a process that dies loses nothing anyway.",
    ),
    Option(
        "--resume",
        section=SNAPSHOTS,
        type=Value("auto|never|VERSION", values.resume, int),
        default="auto",
        show_default=True,
        help="auto: from the newest valid snapshot, where there is one.",
    ),
)

EXIT_WHEN_DONE = Option(
    "--exit-when-done", section=JOB, is_flag=True, help="Stop once every worker that took part has finished."
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
        help="Folder in which primaries and standbys settle who is primary [default: only ps-ctl promote does].",
    ),
    Option(
        "--shipping",
        section=FAILOVER,
        type=click.Choice(values.SHIPPING),
        default="sync",
        help="sync [default]: nothing is acknowledged before the standby has it; async: it may be behind.",
    ),
)

SERVERS_ADDRESSES = Option(
    "--ps",
    section=PLACE,
    also=("PS_SERVERS",),
    type=Value("HOST:PORT[,...]", values.addresses, list),
    help="Servers; any one is enough, the others are discovered.",
)

CONNECT_TIMEOUT = Option(
    "--connect-timeout",
    section=PLACE,
    type=SECONDS,
    default="60",
    show_default=True,
    help="Give up on servers that say nothing for so long.",
)

DEVICE = Option(
    "--device",
    section=LOCAL,
    type=Value("auto|cpu|cuda[:K]", values.device),
    default="auto",
    show_default=True,
    help="What the script computes on; cuda: the GPU by the worker's rank; auto: so too, or the CPU.",
)

WORKER_RANK = Option(
    "--worker-rank",
    section=PLACE,
    type=COUNT_OR_NONE,
    help="0, 1, ... among workers that start together: order of sums [default: order of joining].",
)

SERVER_LOCAL = (LANES, IN_FLIGHT, METRICS_BIND, THREADS, MALLOC)

SERVER: tuple[Option, ...] = (*PLACEMENT, *POLICY, EXIT_WHEN_DONE, *DURABILITY, *STANDBY, *SERVER_LOCAL, *LOGGING)

WORKER: tuple[Option, ...] = (
    SERVERS_ADDRESSES,
    CONNECT_TIMEOUT,
    WORKER_RANK,
    JOB_NAME,
    DEVICE,
    LANES,
    OVERLAP,
    THREADS,
    METRICS_BIND,
    MALLOC,
    *LOGGING,
)

RUN_ONLY: tuple[Option, ...] = (
    Option(
        "--servers", section=CLUSTER, type=COUNT, default=1, show_default=True, help="How many ps-server processes."
    ),
    Option(
        "--workers", section=CLUSTER, type=COUNT, default=1, show_default=True, help="How many ps-worker processes."
    ),
    Option(
        "--max-restarts",
        section=CLUSTER,
        type=COUNT_OR_NONE,
        default=3,
        show_default=True,
        help="So often, in all, a process that a signal or a lost connection ended is started again.",
    ),
    Option(
        "--grace", section=CLUSTER, type=SECONDS, default="10", show_default=True, help="Between SIGTERM and SIGKILL."
    ),
    Option(
        "--log-dir", section=OUTPUT, type=FOLDER, help="A log file per process [default: kept only when the run fails]."
    ),
    Option("--summary", section=OUTPUT, type=FILE, help="Write what came out as JSON."),
)

FORWARDED_TO_SERVERS: tuple[Option, ...] = (*POLICY, *DURABILITY, LANES, IN_FLIGHT, MALLOC)

FORWARDED_TO_WORKERS: tuple[Option, ...] = (JOB_NAME, CONNECT_TIMEOUT, DEVICE, LANES, OVERLAP, MALLOC)

RUN: tuple[Option, ...] = (
    *RUN_ONLY,
    *FORWARDED_TO_SERVERS,
    CONNECT_TIMEOUT,
    DEVICE,
    OVERLAP,
    THREADS,
    METRICS_BIND,
    *LOGGING,
)

TABLES: Mapping[str, tuple[Option, ...]] = {"server": SERVER, "worker": WORKER, "run": RUN}

READS: Mapping[str, tuple[str, ...]] = {
    "server": ("server",),
    "worker": ("worker",),
    "run": ("server", "worker", "run"),
}


def command(table: str, name: str, arguments: Sequence[click.Parameter] = (), **rest: Any) -> Command:
    """The click command with the options of TABLES[table]."""
    return Command(name, TABLES[table], tables=TABLES, reads=READS[table], arguments=arguments, **rest)


def merged(table: str, args: Sequence[str] = ()) -> list[Setting]:
    """What the command of this table would get here and now, from these flags, the environment and the file.

    Errors: click.UsageError for whatever that command itself would refuse while parsing.
    """
    with command(table, f"ps-{table}").make_context(f"ps-{table}", list(args)) as ctx:
        return sources(ctx)
