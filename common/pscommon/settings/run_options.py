"""Options that only ps-run has."""

from pscommon.settings.command import Option
from pscommon.settings.option_types import (
    CLUSTER,
    COUNT,
    COUNT_OR_NONE,
    FILE,
    FOLDER,
    OUTPUT,
    SECONDS,
)

RUN_ONLY: tuple[Option, ...] = (
    Option(
        "--servers",
        section=CLUSTER,
        type=COUNT,
        default=1,
        show_default=True,
        help="Number of ps-server processes.",
        metavar="SERVERS",
    ),
    Option(
        "--workers",
        section=CLUSTER,
        type=COUNT,
        default=1,
        show_default=True,
        help="Number of ps-worker processes.",
        metavar="WORKERS",
    ),
    Option(
        "--max-restarts",
        section=CLUSTER,
        type=COUNT_OR_NONE,
        default=3,
        show_default=True,
        help="Maximum restarts across all processes after a crash or lost connection.",
        metavar="RESTARTS",
    ),
    Option(
        "--grace",
        section=CLUSTER,
        type=SECONDS,
        default="10",
        show_default=True,
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
    Option("--summary", section=OUTPUT, type=FILE, help="File for the result of the run, as JSON."),
    Option(
        "--history",
        section=OUTPUT,
        type=FILE,
        help="File for the values reported by the script, as CSV.",
    ),
)
