"""Exit codes: meaning and remedy of each."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    DONE = 0
    BUG = 1
    USAGE = 2
    TAKEN = 10
    MISMATCH = 11
    NO_SNAPSHOT = 12
    AUTHENTICATION = 13
    NON_FINITE = 14
    NOT_SAVED = 15
    IDLE = 16
    UNREACHABLE = 20
    TOO_FEW_WORKERS = 21
    INTERRUPTED = 130
    TERMINATED = 143


EXPLANATIONS: dict[ExitCode, tuple[str, str]] = {
    ExitCode.DONE: ("done or drained", "nothing"),
    ExitCode.BUG: (
        "a bug in this system or in the training script",
        "read the traceback in the log",
    ),
    ExitCode.USAGE: (
        "bad usage or configuration",
        "compare with --help; `ps-ctl config` shows the source of each value",
    ),
    ExitCode.TAKEN: (
        "a port or data directory is taken",
        "choose another one (port 0 picks a free port), or stop the process that uses it",
    ),
    ExitCode.MISMATCH: (
        "shard, job, model, optimizer or data mismatch",
        "the message shows the difference and the remedy",
    ),
    ExitCode.NO_SNAPSHOT: (
        "no valid snapshot",
        "`ps-ctl snapshot verify DIR` shows the damage; `--resume never` starts a new job",
    ),
    ExitCode.AUTHENTICATION: (
        "authentication failed",
        "the message names the certificate or token to correct; `ps-ctl tls init DIR --renew` "
        "makes new certificates, `ps-ctl token init DIR` makes tokens",
    ),
    ExitCode.NON_FINITE: (
        "a gradient contained NaN or Inf",
        "lower the learning rate or clip; the message names the worker and the tensor",
    ),
    ExitCode.NOT_SAVED: (
        "training finished, but the weights were not saved",
        "free or repair the disk that the message names, then run again; "
        "training continues from the newest snapshot, or starts over if there is none",
    ),
    ExitCode.IDLE: (
        "the script never connected or never stepped",
        "call psworker.connect(), job.optimizer(...) and step() of the returned optimizer; "
        "use `ps-run --allow-idle` if no step is intended",
    ),
    ExitCode.UNREACHABLE: (
        "the servers were unreachable for too long, or dropped this worker",
        "start the servers or correct --ps; then run again",
    ),
    ExitCode.TOO_FEW_WORKERS: (
        "too few workers",
        "start more workers or lower --min-workers; if a worker was lost under --on-worker-loss "
        "abort, find the cause and start the job again, or use shrink or wait:SECONDS",
    ),
    ExitCode.INTERRUPTED: ("interrupted (Ctrl-C)", "nothing"),
    ExitCode.TERMINATED: ("terminated (SIGTERM)", "nothing"),
}
