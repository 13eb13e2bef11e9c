"""The command ps-server."""

import os
from collections.abc import Sequence

import click

from pscommon.entry import raise_on_ctrl_c
from pscommon.security.credentials import read_credentials, use_credentials
from pscommon.security.tls_files import SERVER_NAME
from pscommon.settings import options
from pscommon.settings.command import run_command
from pscommon.settings.environment import unread
from pscommon.system.event_files import check_tensorboard
from pscommon.system.imports import quick_imports
from pscommon.telemetry import logs
from pscommon.telemetry.logs import get_logger
from psserver.process.config import ServerConfig

log = get_logger(__name__)

COMMAND = options.command(
    "server",
    "ps-server",
    help="Serve one shard of a model's parameters. Shard 0 also coordinates the job.",
    epilog="""\b
Examples:
  ps-server --policy sync --min-workers 2                      the only shard, on port 50051
  ps-server --shard 0/2 --data-dir /data/job --policy async    the first of two
  ps-server --config job.toml --shard 1/2 --join host0:50051 \\
    --bind 0.0.0.0:50052 --advertise host1:50052               other settings from a file
  ps-server --config job.toml --shard 1/2 --join host0:50051 --failover-lock /run/job \\
    --standby-of host1:50052 --bind host2:50052

\b
Ports that other machines reach need --tls-ca, --tls-cert and --tls-key (in job.toml, for example);
`ps-ctl tls init` and `ps-ctl token init` make the files.""",
)


def main(args: Sequence[str] | None = None) -> int:
    """Run ps-server; return the exit code."""
    return run_command(COMMAND, start, args)


def start(ctx: click.Context) -> int:
    """Serve until the job ends; return the exit code."""
    config = ServerConfig.from_settings(ctx.params)
    logs.set_up(config.log_level, config.log_format, shard=config.shard, job=config.job)
    for warning in unread(os.environ):
        log.warning("environment_variable_unknown", problem=warning)
    use_credentials(read_credentials(config.security, SERVER_NAME))
    with quick_imports():
        from psserver import app  # imports torch, which --help and usage errors do not need
    if config.tensorboard is not None and config.shard == 0:
        check_tensorboard(config.tensorboard)
    if config.optimizers is not None:
        from pscommon.optim import load_module

        load_module(config.optimizers)
    raise_on_ctrl_c()
    return app.run(config)
