"""The newest log events of a process, as the status has them."""

import logging
import threading

from pscommon.telemetry.logs import get_logger
from pscommon.telemetry.recent_events import (
    MAX_EVENTS_COUNT,
    MAX_TEXT_CHARACTERS,
    RecentEvents,
)

log = get_logger("psserver.test")


def test_events_have_key_level_time_and_fields_as_text() -> None:
    recent = RecentEvents()
    with recent.attached():
        log.warning("worker_lost", worker=3, reason="<b>silent</b>")
        logging.getLogger("grpc").error("bad %s", "metadata")
    log.warning("worker_lost", worker=4)  # after the end

    first, second = recent.newest()
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "event": "worker_lost",
        "fields": {"worker": "3", "reason": "<b>silent</b>"},
    }
    assert (second["event"], second["fields"]) == ("bad metadata", {})


def test_only_the_newest_events_from_info_up_remain() -> None:
    recent, logger = RecentEvents(), logging.getLogger("psserver.test")
    logger.setLevel(logging.DEBUG)
    try:
        with recent.attached():
            for number in range(MAX_EVENTS_COUNT + 5):
                log.info("listening", number=number)
                log.debug("detail")
    finally:
        logger.setLevel(logging.NOTSET)

    numbers = [event["fields"]["number"] for event in recent.newest()]
    assert numbers == [str(number) for number in range(5, MAX_EVENTS_COUNT + 5)]


def test_a_long_text_is_cut_and_a_failure_is_named() -> None:
    recent = RecentEvents()
    with recent.attached():
        try:
            raise ValueError("no such state")
        except ValueError:
            log.error("rpc_failed", detail="x" * 1_000_000, exc_info=True)

    fields = recent.newest()[0]["fields"]
    assert len(fields["detail"]) == MAX_TEXT_CHARACTERS
    assert fields["exception"] == "ValueError('no such state')"


def test_events_are_read_while_others_log() -> None:
    recent, ended = RecentEvents(), threading.Event()

    def log_until_the_end() -> None:
        while not ended.is_set():
            log.warning("worker_lost", worker=1)

    thread = threading.Thread(target=log_until_the_end)
    with recent.attached():
        thread.start()
        found = [len(recent.newest()) for _ in range(300)]
        ended.set()
        thread.join()

    assert max(found) <= MAX_EVENTS_COUNT
