"""ps-worker: one worker, which runs a training script."""

import logging
import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib import import_module
from typing import Any

import click

from pscommon.core.errors import InvalidRequestError
from pscommon.entry import raise_on_ctrl_c
from pscommon.settings import options
from pscommon.settings.command import run_command
from pscommon.settings.environment import unread
from pscommon.system.imports import quick_imports
from pscommon.system.malloc import tune_malloc
from pscommon.telemetry import logs
from psworker.connect import choose_device
from psworker.launch.script import Script, run
from psworker.session.environment import is_on

log = logging.getLogger("psworker")

MODULE = click.Option(
    ["-m", "module"], is_flag=True, help="SCRIPT is a module's name, as in python -m."
)
SCRIPT = click.Argument(["script"], metavar="(SCRIPT | -m MODULE)")
ARGS = click.Argument(["args"], nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")

# Parsing ends at the script's name: what follows is the script's, even if it looks like a flag of
# ours.
UP_TO_THE_SCRIPT = {"allow_interspersed_args": False}

COMMAND = options.command(
    "worker",
    "ps-worker",
    arguments=(MODULE, SCRIPT, ARGS),
    context_settings=UP_TO_THE_SCRIPT,
    help="One worker of a job: runs a training script that calls psworker.connect() or "
    "psworker.Client().",
    epilog="""\b
Examples:
  ps-worker --ps host0:50051 train.py --epochs 3
  ps-worker --ps host0:50051,host1:50052 --device cuda:1 -m my_package.train
  PS_LOCAL=1 ps-worker train.py                 plain training without servers, for debugging

\b
The script finds PS_SERVERS, PS_JOB, PS_DEVICE, PS_WORKER_RANK and PS_WORKER_COUNT in its environment, as far as they
are known.""",
)


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of ps-worker; returns the exit code."""
    return run_command(COMMAND, start, words(COMMAND, args))


def words(command: click.Command, args: Sequence[str] | None) -> list[str]:
    """The command line, with -mMODULE in two words: python takes both, but click would read each
    letter as a flag.
    """
    line = list(sys.argv[1:] if args is None else args)
    valued = {
        flag
        for option in command.params
        if not getattr(option, "is_flag", True)
        for flag in option.opts
    }
    places = iter(range(len(line)))
    for place in places:
        if line[place] in valued:
            next(places, None)
        elif line[place].startswith("-m") and line[place] != "-m":
            return [*line[:place], "-m", line[place][2:], *line[place + 1 :]]
        elif line[place] in ("-m", "--") or not line[place].startswith("-"):
            break
    return line


def start(ctx: click.Context) -> int:
    """Prepares this process and runs the script in it; returns the exit code."""
    settings = ctx.params
    if is_on("PS_LOCAL"):
        if settings["ps"]:
            raise InvalidRequestError(
                f"PS_LOCAL is set, which means training without servers, and so is --ps "
                f"{settings['ps']}: unset one"
            )
    elif not settings["ps"]:
        raise InvalidRequestError(
            "--ps HOST:PORT is missing: the address of any server (or set PS_LOCAL=1 to train "
            "without)"
        )
    script = Script(settings["script"], settings["module"], tuple(settings["args"]))
    # not worker=: that is the number which the servers give it, in their logs and metrics
    logs.set_up(
        settings["log_level"],
        settings["log_format"],
        rank=settings["worker_rank"],
        job=settings["job"],
    )
    for sentence in (
        unread(os.environ) if "PS_WORKER_ATTEMPT" not in os.environ else ()
    ):  # ps-run has said it
        log.warning(sentence)
    if settings["malloc"] == "tuned":
        tune_malloc()
    _import_first(settings["threads"])
    if settings["optimizers"]:
        from pscommon.optim import load_module

        load_module(settings["optimizers"])
    export(settings, os.environ)
    if settings["metrics_bind"]:
        from psworker.session import metrics

        metrics.serve(settings["metrics_bind"])
    raise_on_ctrl_c()
    return run(script, debug=settings["log_level"] == "debug")


def export(settings: dict[str, Any], environ: MutableMapping[str, str]) -> None:
    """Puts what the script and the client ask for into its environment; what is not known stays
    as it is.

    Errors: InvalidRequestError for a GPU that torch does not see.
    """
    told = {
        "PS_SERVERS": settings["ps"],
        "PS_JOB": settings["job"],
        "PS_CONNECT_TIMEOUT": settings["connect_timeout"],
        "PS_LANES": settings["lanes"],
        "PS_OVERLAP": settings["overlap"],
        "PS_WORKER_RANK": settings["worker_rank"],
        "PS_WORKER_COUNT": settings["worker_count"],
        "PS_DEVICE": choose_device(settings["device"], settings["worker_rank"] or 0),
    }
    environ.update({name: str(value) for name, value in told.items() if value is not None})


def _import_first(threads: int | None) -> None:
    """Loads all of ours before the script's folder is on the path: its queue.py must not shadow
    what we need.
    """
    if threads is not None and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # only read when torch is loaded
    with quick_imports():
        for name in ("grpc", "torch", "psworker.client.client", "psworker.job"):
            import_module(name)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
