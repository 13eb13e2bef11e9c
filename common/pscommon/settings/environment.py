"""Variables of the environment that look like settings of ours and are none."""

import difflib
import re
from collections.abc import Iterator, Mapping

from pscommon.settings import options

OTHERS = frozenset(
    {
        "PS_CONFIG",
        "PS_LOCAL",
        "PS_NOT_SAVED_FILE",
        "PS_OUTPUT",
        "PS_TIMEOUT",
        "PS_TRACEBACK_FILE",
        "PS_WORKER_ATTEMPT",
    }
)
"""That our commands read, or tell one another, and that are no option's twin."""

OF_A_SERVICE = re.compile(
    r"PS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What Kubernetes gives to every container where there is a service called ps, or ps-something."""


def unread(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that no command of ours reads, in the order of their names."""
    twins = {
        variable
        for table in options.TABLES.values()
        for option in table
        for variable in option.variables
    }
    words = {name.removeprefix("PS_"): name for name in twins | OTHERS}
    for name in sorted(environ):
        word = name.removeprefix("PS_")
        if word == name or word in words or _is_of_a_service(name, environ[name]):
            continue
        close = difflib.get_close_matches(word, sorted(words), n=1)
        yield f"no setting is called {name}" + (
            f"; did you mean {words[close[0]]}?" if close else ""
        )


def _is_of_a_service(name: str, value: str) -> bool:
    return bool(OF_A_SERVICE.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)
