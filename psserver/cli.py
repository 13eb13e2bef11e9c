"""The command ps-server."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click

from pscommon.core.errors import InvalidRequestError
from pscommon.entry import raise_on_ctrl_c
from pscommon.environments.detection import detect, report, surroundings
from pscommon.environments.place import Place
from pscommon.security.credentials import read_credentials, use_credentials
from pscommon.security.tls_files import SERVER_NAME
from pscommon.settings import options
from pscommon.settings.command import given, run_command
from pscommon.settings.environment import unread
from pscommon.settings.values import ShardIndex, host_and_port, is_ip_address
from pscommon.system.event_files import check_tensorboard
from pscommon.system.imports import quick_imports
from pscommon.telemetry import logs
from pscommon.telemetry.logs import get_logger
from psserver.process.config import ALL_INTERFACES, ServerConfig

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
Without --shard the environment of an engine names the place of this server: TF_CONFIG,
PS_ALL_SERVERS, Slurm; `ps-ctl doctor` shows it.

\b
Ports that other machines reach need --tls-ca, --tls-cert and --tls-key (in job.toml, for example);
`ps-ctl tls init` and `ps-ctl token init` make the files.""",
)


def main(args: Sequence[str] | None = None) -> int:
    """Run ps-server; return the exit code."""
    return run_command(COMMAND, start, args)


def start(ctx: click.Context) -> int:
    """Serve until the job ends; return the exit code."""
    chosen = given(ctx)
    place = detected_place(chosen)
    config = ServerConfig.from_settings(ctx.params | settings_of(place, chosen))
    logs.set_up(config.log_level, config.log_format, shard=config.shard, job=config.job)
    report(place)
    if place is not None and place.workers is not None and config.min_workers > place.workers:
        log.warning(
            "min_workers_not_reached",
            min_workers=config.min_workers,
            workers=place.workers,
            environment=place.environment,
            effect="training does not start before more workers join",
            remedy="`--min-workers` as the number of workers that the engine starts",
        )
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


def detected_place(chosen: Collection[str]) -> Place | None:
    """Return this server's place in the engine's environment; None: `--shard` says it, or there is
    no environment.

    Args:
        chosen: Keys of the settings that the user gave.

    Raises:
        InvalidRequestError: The environment is malformed, or does not know this server.
    """
    if "shard" in chosen:
        return None
    flags = {"workers": "min_workers", "addresses": "join"}
    wanted = {"index", "servers"} | {fact for fact, key in flags.items() if key not in chosen}
    here = surroundings()
    place = detect(here, "server", wanted)
    if place is not None and place.index is None and place.servers is not None:
        name = here.environ.get("POD_NAME") or here.host_name
        raise InvalidRequestError(
            f"{place.environment} names {place.servers} servers, and this host {name[:60]!r} is "
            "none of them. Try: POD_NAME, or `--shard I/N`"
        )
    return place


def settings_of(place: Place | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that follow from a place, without those that the user gave.

    A server whose address has a host name listens on all interfaces: inside its own container the
    name may not be known yet. An explicit `--bind` on all interfaces gets the detected address, at
    which the other processes look for this server.
    """
    if place is None or place.index is None or place.servers is None:
        return {}
    settings: dict[str, Any] = {"shard": ShardIndex(place.index, place.servers)}
    if place.addresses:
        settings["join"] = place.addresses[0]
    if place.workers:
        settings["min_workers"] = place.workers
    if place.address is not None:
        host, port = host_and_port(place.address)
        is_bound = host == "localhost" or is_ip_address(host)
        settings["bind"] = place.address if is_bound else f"0.0.0.0:{port}"
        bound = chosen.get("bind") or settings["bind"]
        if host_and_port(bound)[0] in ALL_INTERFACES:
            settings["advertise"] = place.address
    return {key: value for key, value in settings.items() if key not in chosen}
