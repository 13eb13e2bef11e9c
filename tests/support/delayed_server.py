"""A ps-server of which one phase takes longer: delayed_server.py PLACE SECONDS FLAGS...

It wraps the functions of the phases; the product has no option for this.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pscommon.core.log_entries import Apply
from psserver import cli
from psserver.coordinator import shard_connections
from psserver.durability.best_effort_log import BestEffortLog
from psserver.durability.shard_state import ShardState
from psserver.exchange.exchange import Exchange
from psserver.replication.standby import Standby


def main(place: str, seconds: float, arguments: list[str]) -> int:
    wait = threading.Event().wait
    {
        "apply": delay_apply,
        "log": delay_log,
        "standby": delay_standby,
        "answer": delay_answer,
        "decision": delay_decision,
    }[place](lambda: wait(seconds))
    return cli.main(arguments)


Delay = Callable[[], object]


def delay_apply(delay: Delay) -> None:
    compute = ShardState.compute

    def slow_compute(state: ShardState, entry: Any) -> float:
        if isinstance(entry, Apply):
            delay()
        return compute(state, entry)

    ShardState.compute = slow_compute  # type: ignore[method-assign]


def delay_log(delay: Delay) -> None:
    """Delay the log of pushes, as a disk does to which each byte takes long."""
    append = BestEffortLog.append

    def slow_append(log: BestEffortLog, kind: int, header: bytes, payload: Any = ()) -> None:
        if payload:
            delay()
        append(log, kind, header, payload)

    BestEffortLog.append = slow_append  # type: ignore[method-assign]


def delay_standby(delay: Delay) -> None:
    """Delay the acknowledgements of a standby."""
    requests = Standby._requests

    def slow_requests(standby: Standby) -> Iterator[Any]:
        for request in requests(standby):
            delay()
            yield request

    Standby._requests = slow_requests  # type: ignore[method-assign]


def delay_answer(delay: Delay) -> None:
    send = Exchange._send

    async def slow_send(exchange: Exchange, *args: Any) -> None:
        delay()
        await send(exchange, *args)

    Exchange._send = slow_send  # type: ignore[method-assign]


def delay_decision(delay: Delay) -> None:
    """Delay decisions of the coordinator, not the reports that decide nothing."""
    process_report = shard_connections.process_report

    def slow_process_report(recorder: Any, *args: Any) -> Any:
        before = recorder.coordinator.log.index
        decision = process_report(recorder, *args)
        if any(isinstance(entry, Apply) for entry in recorder.coordinator.log.after(before)):
            delay()
        return decision

    shard_connections.process_report = slow_process_report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
