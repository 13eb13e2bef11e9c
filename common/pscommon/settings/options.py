"""Options of all commands, declared once for the commands, `ps-ctl config` and file checks."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from pscommon.settings import values
from pscommon.settings.command import (
    CLUSTER,
    JOB,
    LOCAL,
    OUTPUT,
    PLACE,
    SECURITY,
    Option,
    Setting,
    SettingsCommand,
    sources,
)
from pscommon.settings.server_options import (
    DURABILITY,
    EXIT_WHEN_DONE,
    JOB_NAME,
    PLACEMENT,
    POLICY,
    STANDBY,
)
from pscommon.settings.values import (
    COUNT,
    COUNT_OR_NONE,
    FILE,
    FOLDER,
    LISTEN,
    MODULE,
    RESOURCES,
    SECONDS,
    ValueType,
)

LOGGING = (
    Option(
        "--log-level",
        section=OUTPUT,
        type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
        default="info",
        help="Lowest level to log.",
    ),
    Option(
        "--log-format",
        section=OUTPUT,
        type=click.Choice(["auto", "text", "json"]),
        default="auto",
        help="Log format; auto: text on a terminal, JSON otherwise.",
    ),
)

THREADS = Option(
    "--threads",
    section=LOCAL,
    type=COUNT,
    help="Compute threads [default: servers: all cores, at most 4; workers: chosen by torch].",
    metavar="THREADS",
)

METRICS_BIND = Option(
    "--metrics-bind",
    section=LOCAL,
    type=LISTEN,
    help="Address that serves /metrics, /livez and /readyz [default: off].",
)

TENSORBOARD = Option(
    "--tensorboard",
    section=OUTPUT,
    type=FOLDER,
    help="Directory for the curves of the training, for TensorBoard; written by shard 0.",
)

LANES = Option(
    "--lanes",
    section=LOCAL,
    type=click.Choice(values.LANES),
    default="auto",
    help="Tensor transport: shm (shared memory), stream (TCP), grpc; auto: the first possible one.",
)

PROTECTION = (
    Option(
        "--tls-ca",
        section=SECURITY,
        type=FILE,
        help="CA certificates of accepted peers, PEM (`ps-ctl tls init`); switches TLS on.",
    ),
    Option("--tls-cert", section=SECURITY, type=FILE, help="Certificate of this process, PEM."),
    Option("--tls-key", section=SECURITY, type=FILE, help="Its private key, PEM, mode 0600."),
    Option(
        "--token-file",
        section=SECURITY,
        type=FILE,
        help="File of tokens (`ps-ctl token init`), mode 0600; servers: all, others: their own.",
    ),
    Option(
        "--insecure",
        section=SECURITY,
        is_flag=True,
        help="Permit plain text beyond loopback: anyone in the network can read and change data.",
    ),
)
"""Options of all commands for TLS and tokens; `security_settings` reads them."""

OVERLAP = Option(
    "--overlap",
    section=LOCAL,
    type=click.Choice(("off", "on")),
    default="off",
    help="Overlap communication with backward and forward; see Job.optimizer.",
)

GROUP = Option(
    "--group",
    section=PLACE,
    is_flag=True,
    help="This process is one rank of a worker; torchrun or ps-run --group-size starts the ranks.",
)

OPTIMIZERS = Option(
    "--optimizers",
    section=JOB,
    type=MODULE,
    help="Module that registers custom optimizers; equal on servers and workers [default: none].",
)

IN_FLIGHT = Option(
    "--in-flight",
    section=LOCAL,
    type=ValueType("BYTES", values.nbytes, int, float),
    help="Limit for bytes of concurrent pushes and pulls, e.g. 2GiB [default: half of the memory].",
)

SERVERS_ADDRESSES = Option(
    "--ps",
    section=PLACE,
    also=("PS_SERVERS",),
    type=ValueType("HOST:PORT[,...]", values.addresses, list),
    help="Server addresses; one is enough, the others are discovered.",
)

CONNECT_TIMEOUT = Option(
    "--connect-timeout",
    section=PLACE,
    type=SECONDS,
    default="60",
    help="Time without any answer from a server before the worker gives up.",
)

DEVICE = Option(
    "--device",
    section=LOCAL,
    type=ValueType("auto|cpu|cuda[:K]", values.device),
    default="auto",
    help="Device for the script; auto: a GPU if available; cuda: GPU chosen by worker rank.",
)

WORKER_RANK = Option(
    "--worker-rank",
    section=PLACE,
    type=COUNT_OR_NONE,
    help="Rank of this worker, fixes the order of sums [default: order of joining].",
    metavar="RANK",
)

WORKER_COUNT = Option(
    "--worker-count",
    section=PLACE,
    type=COUNT,
    help="Workers that start together, passed on as PS_WORKER_COUNT [default: unknown].",
    metavar="WORKERS",
)

PREEMPTION_NOTICE = Option(
    "--preemption-notice",
    section=PLACE,
    type=ValueType("FILE|http://HOST/PATH", values.preemption_notice),
    help="File that appears, or metadata address that answers, before this machine is preempted.",
)

RUN_ONLY: tuple[Option, ...] = (
    Option(
        "--servers",
        section=CLUSTER,
        type=COUNT,
        default=1,
        help="Number of ps-server processes.",
        metavar="SERVERS",
    ),
    Option(
        "--workers",
        section=CLUSTER,
        type=COUNT,
        default=1,
        help="Number of ps-worker processes.",
        metavar="WORKERS",
    ),
    Option(
        "--group-size",
        section=CLUSTER,
        type=COUNT,
        default=1,
        help="Processes of each worker: ranks that share the worker's part of the data.",
        metavar="RANKS",
    ),
    Option(
        "--on",
        section=CLUSTER,
        type=click.Choice(("local", "ray")),
        default="local",
        help="Where processes run: on this machine, or on the nodes of a Ray cluster.",
    ),
    Option(
        "--worker-resources",
        section=CLUSTER,
        type=RESOURCES,
        default="CPU=1",
        help="Ray: resources of each worker.",
    ),
    Option(
        "--max-restarts",
        section=CLUSTER,
        type=COUNT_OR_NONE,
        default=3,
        help="Maximum restarts across all processes after a crash or lost connection.",
        metavar="RESTARTS",
    ),
    Option(
        "--grace",
        section=CLUSTER,
        type=SECONDS,
        default="10",
        help="Time between SIGTERM and SIGKILL.",
    ),
    Option(
        "--log-dir",
        section=OUTPUT,
        type=FOLDER,
        help="Directory for one log file per process [default: logs are kept only on failure].",
    ),
    Option(
        "--allow-idle",
        section=CLUSTER,
        is_flag=True,
        help="Exit with 0 instead of 16 if the script makes no training step.",
    ),
    Option(
        "--open",
        section=OUTPUT,
        is_flag=True,
        help="Open the live page of the job in a browser.",
    ),
    Option("--summary", section=OUTPUT, type=FILE, help="File for the result of the run, as JSON."),
    Option(
        "--history",
        section=OUTPUT,
        type=FILE,
        help="File for the values reported by the script, as CSV.",
    ),
)
"""Options that only ps-run has."""

SERVER: tuple[Option, ...] = (
    *PLACEMENT,
    *POLICY,
    EXIT_WHEN_DONE,
    OPTIMIZERS,
    *DURABILITY,
    *STANDBY,
    *PROTECTION,
    LANES,
    IN_FLIGHT,
    METRICS_BIND,
    TENSORBOARD,
    THREADS,
    *LOGGING,
)

WORKER: tuple[Option, ...] = (
    SERVERS_ADDRESSES,
    CONNECT_TIMEOUT,
    WORKER_RANK,
    WORKER_COUNT,
    PREEMPTION_NOTICE,
    GROUP,
    JOB_NAME,
    OPTIMIZERS,
    *PROTECTION,
    DEVICE,
    LANES,
    OVERLAP,
    THREADS,
    METRICS_BIND,
    *LOGGING,
)

FORWARDED_TO_SERVERS: tuple[Option, ...] = (
    *POLICY,
    OPTIMIZERS,
    *DURABILITY,
    *PROTECTION,
    LANES,
    IN_FLIGHT,
    TENSORBOARD,
)

FORWARDED_TO_WORKERS: tuple[Option, ...] = (
    JOB_NAME,
    OPTIMIZERS,
    CONNECT_TIMEOUT,
    *PROTECTION,
    DEVICE,
    LANES,
    OVERLAP,
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

VARIABLES = frozenset(
    variable for table in TABLES.values() for option in table for variable in option.variables
)
"""Environment variables of all options."""

READS: Mapping[str, tuple[str, ...]] = {
    "server": ("server",),
    "worker": ("worker",),
    "run": ("server", "worker", "run"),
}


def command(
    table: str, name: str, arguments: Sequence[click.Parameter] = (), **remaining: Any
) -> SettingsCommand:
    """Return the click command with the options of TABLES[table]."""
    return SettingsCommand(
        name, TABLES[table], tables=TABLES, reads=READS[table], arguments=arguments, **remaining
    )


def merged(table: str, args: Sequence[str] = ()) -> list[Setting]:
    """Return the settings of a command from these flags, the environment and the file.

    Raises:
        click.UsageError: the command would refuse these settings.
    """
    with command(table, f"ps-{table}").make_context(f"ps-{table}", list(args)) as ctx:
        return sources(ctx)
