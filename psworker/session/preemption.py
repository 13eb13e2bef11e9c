"""Preemption notices of spot machines: the worker leaves as after SIGTERM.

A notice is a file that appears, or an address of the machine's metadata server:

- Google Compute Engine, `.../computeMetadata/v1/instance/preempted`: 200 with FALSE, then TRUE. A
  request needs a header.
- Amazon EC2, `.../latest/meta-data/spot/instance-action`: 404, then 200. Where the machine requires
  IMDSv2 a request without a session token gets 401.
"""

import http.client
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pscommon.telemetry.logs import get_logger
from psworker.session import drain

POLL_SECONDS = 5.0
JOIN_POLL_SECONDS = 0.5
ANSWER_SECONDS = 2.0
MAX_ANSWER_BYTES = 4096

GOOGLE = {"Metadata-Flavor": "Google"}
TOKEN_PATH, TOKEN_HEADER = "/latest/api/token", "X-aws-ec2-metadata-token"
TOKEN_REQUEST = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
NO_NOTICE = ("", "FALSE", "NONE")

log = get_logger(__name__)


def watch(place: str, poll_seconds: float = POLL_SECONDS) -> None:
    """Watch this file or address in a thread until the notice comes."""
    threading.Thread(
        target=_watch, args=(place, poll_seconds), name="preemption", daemon=True
    ).start()


def is_noticed(place: str) -> bool:
    """Return whether the machine is to be preempted.

    Raises:
        OSError: The address does not answer, or not as a metadata server.
    """
    if not place.startswith("http://"):
        return Path(place).exists()
    status, answer = _ask(place, "GET", GOOGLE)
    if status == http.client.UNAUTHORIZED:
        url = urlsplit(place)._replace(path=TOKEN_PATH, query="").geturl()
        status, token = _ask(url, "PUT", TOKEN_REQUEST)
        if status == http.client.OK:
            status, answer = _ask(place, "GET", {TOKEN_HEADER: token})
    if status not in (http.client.OK, http.client.NOT_FOUND):
        raise OSError(f"it answers {status}")
    return status == http.client.OK and answer.upper() not in NO_NOTICE


def _watch(place: str, poll_seconds: float) -> None:
    is_logged, pause = False, threading.Event()
    while True:
        try:
            if is_noticed(place):
                break
        except (OSError, http.client.HTTPException) as error:
            if not is_logged:
                log.warning("preemption_unknown", place=place, problem=str(error) or repr(error))
            is_logged = True
        pause.wait(poll_seconds)
    log.info("preemption_noticed", place=place)
    while not drain.ask_all():  # the script has not joined a job yet
        pause.wait(JOIN_POLL_SECONDS)


def _ask(url: str, method: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """Return the status and the text of the answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=ANSWER_SECONDS)
    try:
        path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_ANSWER_BYTES).decode("latin-1").strip()
    finally:
        connection.close()
