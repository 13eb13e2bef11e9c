"""Environment variables PS_*: those that no command reads, and the environment without settings."""

import difflib
import re
from collections.abc import Iterator, Mapping

from pscommon.settings import options

OTHERS = frozenset(
    {
        "PS_ALL_SERVERS",
        "PS_BATCH_TRIAL",
        "PS_CONFIG",
        "PS_LOCAL",
        "PS_NOT_SAVED_FILE",
        "PS_OUTPUT",
        "PS_TIMEOUT",
        "PS_TRACEBACK_FILE",
        "PS_WORKER_ATTEMPT",
    }
)
"""Variables that the commands use and that belong to no option."""

SERVICE_VARIABLE = re.compile(
    r"PS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every container for a service called ps or ps-NAME."""


def unread(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each PS_ variable that no command reads, ordered by name."""
    words = {name.removeprefix("PS_"): name for name in options.VARIABLES | OTHERS}
    for name in sorted(environ):
        word = name.removeprefix("PS_")
        if word == name or word in words or _is_service_variable(name, environ[name]):
            continue
        close = difflib.get_close_matches(word, sorted(words), n=1)
        yield f"no setting is called {name}" + (
            f"; did you mean {words[close[0]]}?" if close else ""
        )


def _is_service_variable(name: str, value: str) -> bool:
    return bool(SERVICE_VARIABLE.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that set options of the commands.

    For child processes that get all their settings as flags.
    """
    settings = options.VARIABLES | {"PS_CONFIG"}
    return {key: value for key, value in environ.items() if key not in settings}
