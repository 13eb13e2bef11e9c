"""Options of ps-run alone."""

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
        help="How many ps-server processes.",
    ),
    Option(
        "--workers",
        section=CLUSTER,
        type=COUNT,
        default=1,
        show_default=True,
        help="How many ps-worker processes.",
    ),
    Option(
        "--max-restarts",
        section=CLUSTER,
        type=COUNT_OR_NONE,
        default=3,
        show_default=True,
        help="So often, in all, a process that a signal or a lost connection ended is started "
        "again.",
    ),
    Option(
        "--grace",
        section=CLUSTER,
        type=SECONDS,
        default="10",
        show_default=True,
        help="Between SIGTERM and SIGKILL.",
    ),
    Option(
        "--log-dir",
        section=OUTPUT,
        type=FOLDER,
        help="A log file per process [default: kept only when the run fails].",
    ),
    Option(
        "--allow-idle",
        section=CLUSTER,
        is_flag=True,
        help="Exit with 0, not 16, when the script has made no training step.",
    ),
    Option("--summary", section=OUTPUT, type=FILE, help="Write what came out as JSON."),
    Option(
        "--history",
        section=OUTPUT,
        type=FILE,
        help="Write the values that the script has reported as CSV.",
    ),
)
