"""Exit codes: what each means and what to do about it."""

from enum import IntEnum


class ExitCode(IntEnum):
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
        "a bug, in this system or in the training script",
        "read the traceback in the log",
    ),
    ExitCode.USAGE: (
        "bad usage or configuration",
        "compare with --help; `ps-ctl config` shows where each value came from",
    ),
    ExitCode.TAKEN: (
        "a port or data directory is taken",
        "choose another (port 0 picks a free one), or stop its holder",
    ),
    ExitCode.MISMATCH: (
        "shard, job, model, optimizer or data mismatch",
        "the message shows the difference, what was compared, and what to do about it",
    ),
    ExitCode.NO_SNAPSHOT: (
        "no valid snapshot",
        "`ps-ctl snapshot verify DIR` says what is damaged; --resume never starts from nothing",
    ),
    ExitCode.AUTHENTICATION: ("authentication failed", "check the token"),
    ExitCode.NON_FINITE: (
        "a gradient held NaN or Inf",
        "lower the learning rate or clip; the message names the worker and the tensor",
    ),
    ExitCode.NOT_SAVED: (
        "trained, but not saved",
        "the message names the disk or the file: free space or repair it, then run again; "
        "training continues from "
        "the newest snapshot there is, or starts over",
    ),
    ExitCode.IDLE: (
        "the script never connected or never stepped",
        "call psworker.connect(), job.optimizer(...), and step() of what that returned; where the "
        "script is meant to "
        "make no step, use `ps-run --allow-idle`",
    ),
    ExitCode.UNREACHABLE: (
        "the servers were unreachable for too long, or went on without this worker",
        "start them or check --ps; then run again",
    ),
    ExitCode.TOO_FEW_WORKERS: (
        "too few workers",
        "start as many as --min-workers asks for, or lower it; where one was lost under "
        "--on-worker-loss abort, find "
        "out why and start the job again, or choose shrink or wait:SECONDS",
    ),
    ExitCode.INTERRUPTED: ("interrupted (Ctrl-C)", "nothing"),
    ExitCode.TERMINATED: ("terminated (SIGTERM)", "nothing"),
}
