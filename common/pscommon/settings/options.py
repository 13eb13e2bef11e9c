"""The options of every command, declared once: the commands, `ps-ctl config` and the check of
files all read these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from pscommon.settings import values
from pscommon.settings.command import Option, Setting, SettingsCommand, sources
from pscommon.settings.option_types import (
    COUNT,
    COUNT_OR_NONE,
    JOB,
    LISTEN,
    LOCAL,
    MODULE,
    OUTPUT,
    PLACE,
    SECONDS,
)
from pscommon.settings.run_options import RUN_ONLY
from pscommon.settings.server_options import (
    DURABILITY,
    EXIT_WHEN_DONE,
    JOB_NAME,
    PLACEMENT,
    POLICY,
    STANDBY,
)
from pscommon.settings.values import ValueType

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
    help="How tensors move: shm through memory that both share, grpc over the network; auto: shm "
    "on one host.",
)

OVERLAP = Option(
    "--overlap",
    section=LOCAL,
    type=click.Choice(("off", "on")),
    default="off",
    show_default=True,
    help="on: gradients leave during backward, forward waits for weights layer by layer (see "
    "Job.optimizer).",
)

MALLOC = Option(
    "--malloc",
    section=LOCAL,
    type=click.Choice(values.MALLOC),
    default="tuned",
    show_default=True,
    help="tuned: this process keeps freed memory for its next large buffers; system: glibc's own "
    "settings.",
)

OPTIMIZERS = Option(
    "--optimizers",
    section=JOB,
    type=MODULE,
    help="Module that registers optimizers of your own; the same for all servers and workers "
    "[default: none].",
)

IN_FLIGHT = Option(
    "--in-flight",
    section=LOCAL,
    type=ValueType("BYTES", values.nbytes, int, float),
    help="Bound on bytes of pushes and pulls that a server holds, 2GiB say [default: half of the "
    "memory].",
)

SERVERS_ADDRESSES = Option(
    "--ps",
    section=PLACE,
    also=("PS_SERVERS",),
    type=ValueType("HOST:PORT[,...]", values.addresses, list),
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
    type=ValueType("auto|cpu|cuda[:K]", values.device),
    default="auto",
    show_default=True,
    help="What the script computes on; cuda: the GPU by the worker's rank; auto: so too, or the "
    "CPU.",
)

WORKER_RANK = Option(
    "--worker-rank",
    section=PLACE,
    type=COUNT_OR_NONE,
    help="0, 1, ... among workers that start together: order of sums [default: order of joining].",
)

WORKER_COUNT = Option(
    "--worker-count",
    section=PLACE,
    type=COUNT,
    help="Number of workers that start together, for the script: PS_WORKER_COUNT [default: "
    "unknown].",
)

SERVER_JOB = (*POLICY, EXIT_WHEN_DONE, OPTIMIZERS)

SERVER_LOCAL = (LANES, IN_FLIGHT, METRICS_BIND, THREADS, MALLOC)

SERVER: tuple[Option, ...] = (
    *PLACEMENT,
    *SERVER_JOB,
    *DURABILITY,
    *STANDBY,
    *SERVER_LOCAL,
    *LOGGING,
)

WORKER: tuple[Option, ...] = (
    SERVERS_ADDRESSES,
    CONNECT_TIMEOUT,
    WORKER_RANK,
    WORKER_COUNT,
    JOB_NAME,
    OPTIMIZERS,
    DEVICE,
    LANES,
    OVERLAP,
    THREADS,
    METRICS_BIND,
    MALLOC,
    *LOGGING,
)

FORWARDED_TO_SERVERS: tuple[Option, ...] = (
    *POLICY,
    OPTIMIZERS,
    *DURABILITY,
    LANES,
    IN_FLIGHT,
    MALLOC,
)

FORWARDED_TO_WORKERS: tuple[Option, ...] = (
    JOB_NAME,
    OPTIMIZERS,
    CONNECT_TIMEOUT,
    DEVICE,
    LANES,
    OVERLAP,
    MALLOC,
)

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


def command(
    table: str, name: str, arguments: Sequence[click.Parameter] = (), **rest: Any
) -> SettingsCommand:
    """The click command with the options of TABLES[table]."""
    return SettingsCommand(
        name, TABLES[table], tables=TABLES, reads=READS[table], arguments=arguments, **rest
    )


def merged(table: str, args: Sequence[str] = ()) -> list[Setting]:
    """What the command of this table would get here and now, from these flags, the environment
    and the file.

    Errors: click.UsageError for whatever that command itself would refuse while parsing.
    """
    with command(table, f"ps-{table}").make_context(f"ps-{table}", list(args)) as ctx:
        return sources(ctx)
