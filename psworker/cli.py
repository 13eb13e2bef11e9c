"""ps-worker: run a training script as one worker of a job."""

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from pscommon.core.errors import InvalidRequestError
from pscommon.entry import raise_on_ctrl_c
from pscommon.environments.detection import report
from pscommon.environments.place import Place
from pscommon.security.credentials import read_credentials, use_credentials
from pscommon.security.settings import (
    TLS_KEYS,
    check_exposure,
    security_settings,
    warn_of_plain_text,
)
from pscommon.settings import options
from pscommon.settings.command import run_command
from pscommon.settings.environment import unread
from pscommon.system.imports import quick_imports
from pscommon.system.process_limits import tune_malloc
from pscommon.telemetry import logs
from pscommon.telemetry.logs import get_logger
from psworker.connect import choose_device
from psworker.session import preemption
from psworker.session.arguments import GROUP_VARIABLE, detected_worker, group_place, is_on
from psworker.supervision.script import Script, run

log = get_logger(__name__)

MODULE = click.Option(
    ["-m", "module"], is_flag=True, help="Run a module as the script, like python -m."
)
SCRIPT = click.Argument(["script"], metavar="(SCRIPT | -m MODULE)")
ARGS = click.Argument(["args"], nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")

# parsing ends at the name of the script; all following arguments belong to the script
FLAGS_BEFORE_SCRIPT = {"allow_interspersed_args": False}

COMMAND = options.command(
    "worker",
    "ps-worker",
    arguments=(MODULE, SCRIPT, ARGS),
    context_settings=FLAGS_BEFORE_SCRIPT,
    help="Run a training script as one worker of a job. The script calls psworker.connect() or "
    "psworker.Client().",
    epilog="""\b
Examples:
  ps-worker --ps 127.0.0.1:50051 train.py --epochs 3
  ps-worker --config job.toml --ps host0:50051,host1:50052 --device cuda:1 -m my_package.train
  PS_LOCAL=1 ps-worker train.py                 plain training without servers, for debugging
  torchrun --nproc-per-node 4 --no-python ps-worker --group --ps host0:50051 train.py
                                                four processes of this machine as one worker

\b
Without --ps and --worker-rank the environment of an engine names servers and rank: TF_CONFIG,
PS_ALL_SERVERS, JOB_COMPLETION_INDEX, Slurm, torchrun; `ps-ctl doctor` shows it.

\b
Servers on other machines need --tls-ca, --tls-cert, --tls-key and --token-file (in job.toml, for
example).

\b
The script gets PS_SERVERS, PS_JOB, PS_DEVICE, PS_WORKER_RANK and PS_WORKER_COUNT in its
environment, if they are known.""",
)


def main(args: Sequence[str] | None = None) -> int:
    """Run ps-worker and return its exit code."""
    return run_command(COMMAND, start, words(COMMAND, args))


def words(command: click.Command, args: Sequence[str] | None) -> list[str]:
    """Return the command line with -mMODULE split in two; click would read letters as flags."""
    line = list(sys.argv[1:] if args is None else args)
    valued = {
        flag
        for option in command.params
        if not getattr(option, "is_flag", True)
        for flag in option.opts
    }
    indices = iter(range(len(line)))
    for index in indices:
        if line[index] in valued:
            next(indices, None)
        elif line[index].startswith("-m") and line[index] != "-m":
            return [*line[:index], "-m", line[index][2:], *line[index + 1 :]]
        elif line[index] in ("-m", "--") or not line[index].startswith("-"):
            break
    return line


def start(ctx: click.Context, *, function: Callable[[], object] | None = None) -> int:
    """Prepare this process, run the script, or the function, and return its exit code."""
    settings = ctx.params
    detected = complete(settings, os.environ)
    security = security_settings(settings)
    if settings["metrics_bind"] is not None:
        check_exposure("--metrics-bind", settings["metrics_bind"], security)
    use_credentials(read_credentials(security))
    script = Script(settings["script"], settings["module"], tuple(settings["args"]), function)
    # not worker=: in logs and metrics of the servers that is the worker number
    logs.set_up_worker(
        settings["log_level"],
        settings["log_format"],
        rank=settings["worker_rank"],
        job=settings["job"],
    )
    report(detected)
    if "PS_WORKER_ATTEMPT" not in os.environ:  # ps-run has shown these warnings
        for warning in unread(os.environ):
            log.warning("environment_variable_unknown", problem=warning)
    warn_of_plain_text((settings["metrics_bind"],), security)
    tune_malloc()
    _import_first(settings["threads"])
    if settings["optimizers"]:
        from pscommon.optim import load_module

        load_module(settings["optimizers"])
    export(settings, os.environ)
    place = group_place(os.environ)
    if place is not None:
        from psworker.group.process_group import open_link

        open_link(place, os.environ)
    if settings["metrics_bind"] and (place is None or place.rank == 0):
        from psworker.session import metrics

        metrics.serve(settings["metrics_bind"])
    if settings["preemption_notice"]:
        preemption.watch(settings["preemption_notice"])
    raise_on_ctrl_c()
    code = run(script, debug=settings["log_level"] == "debug")
    if code and place is not None:
        from psworker.group.process_group import settle

        settle()
    return code


def complete(settings: dict[str, Any], environ: Mapping[str, str]) -> Place | None:
    """Fill in what the engine's environment says about this worker, where no setting does.

    Returns:
        The place that was detected.

    Raises:
        InvalidRequestError: No servers are named, or the environment is malformed.
    """
    if is_on("PS_LOCAL", environ):
        if settings["ps"]:
            raise InvalidRequestError(
                f"PS_LOCAL excludes `--ps {settings['ps']}`: it trains without servers. Try: unset "
                "one of them"
            )
        return None
    facts = {"addresses": "ps", "index": "worker_rank", "workers": "worker_count"}
    wanted = [fact for fact, key in facts.items() if settings[key] is None]
    group = {GROUP_VARIABLE: "1"} if settings["group"] else {}
    place = detected_worker(wanted, {**environ, **group})
    for fact in wanted if place is not None else ():
        found = getattr(place, fact)
        settings[facts[fact]] = ",".join(found) or None if fact == "addresses" else found
    if not settings["ps"]:
        raise InvalidRequestError(
            "`--ps HOST:PORT` is missing. Try: the address of any server, or PS_LOCAL=1 to train "
            "without servers"
        )
    return place


def export(settings: dict[str, Any], environ: MutableMapping[str, str]) -> None:
    """Put the known settings of the script and its client into the environment.

    Raises:
        InvalidRequestError: torch does not see the requested GPU.
    """
    variables = {
        "PS_SERVERS": settings["ps"],
        "PS_JOB": settings["job"],
        "PS_CONNECT_TIMEOUT": settings["connect_timeout"],
        "PS_LANES": settings["lanes"],
        "PS_OVERLAP": settings["overlap"],
        "PS_WORKER_RANK": settings["worker_rank"],
        "PS_WORKER_COUNT": settings["worker_count"],
        **{f"PS_{key.upper()}": _absolute(settings[key]) for key in (*TLS_KEYS, "token_file")},
        "PS_INSECURE": "1" if settings["insecure"] else None,
        GROUP_VARIABLE: "1" if settings["group"] else None,
        "PS_DEVICE": choose_device(settings["device"], _number_on_machine(settings, environ)),
    }
    environ.update({name: str(value) for name, value in variables.items() if value is not None})


def _number_on_machine(settings: dict[str, Any], environ: MutableMapping[str, str]) -> int:
    """Return the number by which a GPU is chosen: workers of one machine take different ones."""
    place = group_place({**environ, GROUP_VARIABLE: "1"}) if settings["group"] else None
    worker = int(settings["worker_rank"] or 0)
    return worker if place is None else worker * place.size + place.rank


def _absolute(path: Path | None) -> Path | None:
    """Return a path that is still right after the script has changed its folder."""
    return None if path is None else path.absolute()


def _import_first(threads: int | None) -> None:
    """Import modules before the script's folder is on the path; it may shadow them."""
    if threads is not None and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported
    with quick_imports():
        for name in ("grpc", "torch", "psworker.client.client", "psworker.job"):
            import_module(name)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
