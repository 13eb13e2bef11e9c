"""Injected RPC faults: drawn as configured, and each push counts once in spite of them."""

import pytest

from pscommon.core.errors import UnreachableError
from pscommon.wire.requests import HEARTBEAT, AnyRequest
from psproto.v1 import coordinator_pb2 as co
from psworker.core.clock import Clock
from tests.support.rpc_faults import Faults, FaultyLane, Rule

EXCHANGE = "ParameterServerService.Exchange"
ALL = "*=-1:10%:10%:10%"
PUSHES = 40


def test_a_rule_is_parsed() -> None:
    assert Rule.parse("A.B=3:10%:25%") == Rule("A.B", 3, 0.1, 0.25)
    assert Rule.parse(" A.*=-1:1%:2%:3%") == Rule("A.*", -1, 0.01, 0.02, 0.03)


@pytest.mark.parametrize(
    "text", ["A.B", "A.B=3", "A.B=3:10:20", "=3:1%:1%", "A.B=x:1%:1%", "A.B=1:1%:1%:1%:1%"]
)
def test_an_invalid_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"A\.B|=3|invalid literal"):
        Rule.parse(text)


def test_faults_occur_with_their_probability() -> None:
    faults = Faults("A.B=-1:10%:20%:30%")
    for _ in range(4000):
        faults.draw("A.B")
    shares = [
        faults.happened(fault) / 4000 for fault in ("request lost", "reply lost", "duplicate")
    ]

    assert shares == pytest.approx([0.1, 0.2, 0.3], abs=0.03)


def test_the_first_matching_rule_applies_up_to_its_budget() -> None:
    faults = Faults("A.B=2:100%:0%,A.C=0:100%:0%,*=-1:0%:100%")

    assert [faults.draw("A.B") for _ in range(3)] == ["request lost", "request lost", ""]
    assert faults.draw("A.C") == ""
    assert faults.draw("X.Y", shard=3) == "reply lost"


def test_faults_of_a_seed_do_not_depend_on_the_order_of_shards() -> None:
    def draw_faults(seed: int, shards: list[int]) -> dict[int, list[str]]:
        faults, found = Faults("*=-1:20%:20%:20%", seed), {0: [], 1: []}
        for shard in shards:
            found[shard].append(faults.draw(EXCHANGE, shard))
        return found

    assert draw_faults(1, [0] * 30 + [1] * 30) == draw_faults(1, [0, 1] * 30)
    assert draw_faults(1, [0, 1] * 30) != draw_faults(2, [0, 1] * 30)


class CountingLane:
    """A lane to a server that counts heartbeats."""

    direct, addresses, clock = False, ("here",), Clock(lambda: 0.0, lambda seconds: None)

    def __init__(self) -> None:
        self.calls = 0

    def request(self, row: AnyRequest, message: object, timeout: float, shard: int) -> object:
        self.calls += 1
        return co.HeartbeatResponse(version=self.calls)


@pytest.mark.parametrize(("rule", "calls"), [("*=1:100%:0%", 0), ("*=1:0%:100%", 1)])
def test_a_call_with_a_lost_reply_runs_and_one_with_a_lost_request_does_not(
    rule: str, calls: int
) -> None:
    counting = CountingLane()
    lane = FaultyLane(counting, Faults(rule))  # type: ignore[arg-type]  # the one method that is called
    with pytest.raises(UnreachableError, match=r"CoordinatorService\.Heartbeat"):
        lane.request(HEARTBEAT, co.HeartbeatRequest(), 1.0)

    assert counting.calls == calls
    assert lane.request(HEARTBEAT, co.HeartbeatRequest(), 1.0).version == calls + 1


def test_a_duplicated_call_runs_twice_and_returns_the_first_answer() -> None:
    counting = CountingLane()
    lane = FaultyLane(counting, Faults("*=1:0%:0%:100%"))  # type: ignore[arg-type]

    assert lane.request(HEARTBEAT, co.HeartbeatRequest(), 1.0).version == 1
    assert counting.calls == 2
