"""Where a worker looks for the primary of a shard."""

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

import grpc
import pytest

from pscommon.core.errors import LayoutError, UnreachableError
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psworker.transport.endpoints import Endpoints
from psworker.transport.grpc import GrpcTransport
from tests.support.fake_server import FakeCluster
from tests.support.ports import free_port
from tests.support.workers import until


@pytest.fixture
def places() -> Endpoints:
    """Two shards at a and b; a has a standby at c."""
    places = Endpoints(["a", "b"], ["a", "b", "d"])
    assert places.learn(0, "a", 1, "c") == set()
    return places


def test_who_is_silent_is_asked_in_turn_with_its_standby(places: Endpoints) -> None:
    places.switch(0, "a")
    assert places.addresses == ("c", "b")
    places.switch(0, "a")  # another thread, which asked before
    assert places.addresses == ("c", "b")
    places.switch(0, "c")
    assert places.addresses == ("a", "b")


def test_the_primary_is_not_forgotten_while_its_standby_is_asked(places: Endpoints) -> None:
    """It was away for a moment, and is primary still: heartbeats say so, and where its standby
    is.
    """
    places.switch(0, "a")
    assert places.learn_from_shard_0(0, "a", 1, "c") == set()
    assert places.addresses == ("c", "b")

    places.switch(0, "c")

    assert places.addresses == ("a", "b")
    places.switch(0, "a")
    assert places.addresses == ("c", "b")


def test_where_nobody_serves_a_shard_its_standby_is_heard_of(places: Endpoints) -> None:
    assert places.learn(1, "b", 1) == set()
    assert places.learn_from_shard_0(1, "", 1, "e") == set()

    places.switch(1, "b")

    assert places.addresses == ("a", "e")


def test_without_a_standby_there_is_nobody_else(places: Endpoints) -> None:
    places.switch(1, "b")

    assert places.addresses == ("a", "b")


def test_a_higher_term_voids_the_address_before(places: Endpoints) -> None:
    assert places.learn(0, "c", 2) == {"a"}
    assert places.addresses == ("c", "b")
    assert places.learn(0, "a", 1) == set()
    assert places.addresses == ("c", "b")


def test_what_was_found_by_trying_is_voided_too(places: Endpoints) -> None:
    places.switch(0, "a")

    assert places.learn(0, "c", 2, "a2") == {"a"}


def test_the_first_word_of_a_term_does_not_move_anybody(places: Endpoints) -> None:
    """An address that the user gave is reachable; what the server calls itself may not be."""
    assert places.learn(1, "advertised", 1) == set()
    assert places.addresses == ("a", "b")


def test_who_is_started_again_elsewhere_is_followed_in_the_same_term(places: Endpoints) -> None:
    assert (
        places.learn_from_shard_0(1, "b-as-advertised", 0, "") == set()
    )  # b is another name of it
    assert places.learn_from_shard_0(1, "b-as-advertised", 1, "") == set()
    assert places.addresses == ("a", "b")

    assert places.learn_from_shard_0(1, "", 1, "") == set()  # it is away
    assert places.learn_from_shard_0(1, "b2", 1, "e") == {"b"}
    assert places.addresses == ("a", "b2")
    places.switch(1, "b2")
    assert places.addresses == ("a", "e")


def test_who_comes_back_elsewhere_before_its_term_was_heard_is_followed() -> None:
    places = Endpoints(["a", "b"], ["a"])  # where b is, a has said
    assert places.learn_from_shard_0(1, "b2", 1, "") == {"b"}
    assert places.addresses == ("a", "b2")


def test_after_a_move_the_new_addresses_are_those_that_were_told(places: Endpoints) -> None:
    places.relocate(["a", "b", "x"])
    assert places.learn_from_shard_0(2, "y", 1, "") == {"x"}


def test_where_a_primary_of_a_lower_term_was_started_again_is_no_news(places: Endpoints) -> None:
    places.learn_from_shard_0(1, "c", 2, "")
    assert places.learn_from_shard_0(1, "b2", 1, "") == set()
    assert places.addresses == ("a", "c")


def test_a_late_word_of_a_deposed_shard_0_moves_nobody() -> None:
    with closing(GrpcTransport(["a:1", "b:1"])) as lane:
        lane.learn("job", ["a2:1", "b2:1"], [2, 1], ["", ""])
        assert lane.addresses == ("a2:1", "b2:1")
        lane.learn("job", ["a:1", "b:1"], [1, 1], ["", ""])
        assert lane.addresses == ("a2:1", "b2:1")


def test_an_answer_of_a_lower_term_is_refused(places: Endpoints) -> None:
    places.check(0, 2)

    with pytest.raises(UnreachableError, match="term 1; its primary is of term 2") as refused:
        places.check(0, 1)
    assert refused.value.reason == "NOT_PRIMARY"


def test_all_who_may_know_are_known(places: Endpoints) -> None:
    assert places.known_addresses == ["a", "b", "d", "c"]


def test_another_number_of_servers_is_news_for_each_exchange(places: Endpoints) -> None:
    assert places.count(2)
    places.check_layout()

    assert not places.count(1)
    with pytest.raises(LayoutError, match="the job has 1 servers now, not 2"):
        places.check_layout()
    places.relocate(["a"])
    places.check_layout()


def test_who_looks_around_bears_a_line_that_another_thread_closes() -> None:
    """One that hears of a new primary, say; the heartbeats that look around must go on."""
    with closing(GrpcTransport([f"127.0.0.1:{free_port()}"])) as lane:
        assert not lane.find_primaries("job", 0.1)
        for line in lane._channels.values():
            line.close()
        assert not lane.find_primaries("job", 0.1)


def test_a_line_is_not_closed_before_all_that_can_be_asked_on_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stub on a closed channel would be a crash, in C."""
    make, early = ParameterServerServiceStub, []

    def making(channel: grpc.Channel) -> ParameterServerServiceStub:
        leaving = pool.submit(lane.relocate, [])
        early.extend(wait([leaving], 0.1).done)
        return make(channel)

    monkeypatch.setattr("psworker.transport.grpc.ParameterServerServiceStub", making)
    with (
        closing(GrpcTransport([f"127.0.0.1:{free_port()}"])) as lane,
        ThreadPoolExecutor(1) as pool,
    ):
        lane.find_primaries("job", 0.1)
    assert not early


def test_a_shard_of_which_shard_0_has_not_heard_is_told_where_that_is() -> None:
    """Its standby may have taken over before all shards had heard of it. Again, until it is
    there.
    """
    with FakeCluster(shards=2) as cluster, closing(GrpcTransport(cluster.addresses)) as lane:
        lane.learn("job", ["", cluster.addresses[1]], [1, 1], ["", ""])
        lane.learn("job", [cluster.addresses[0], ""], [1, 1], ["", ""])
        until(lambda: cluster.servers[1].introduced, "an introduction")
        lane.learn("job", cluster.addresses, [1, 1], ["", ""])
    assert cluster.servers[1].introduced == [cluster.addresses[0]]


def test_nobody_is_introduced_over_a_connection_that_is_closed() -> None:
    """By a heartbeat that is answered just then."""
    lane = GrpcTransport(["a:1", "b:1"])
    lane.close()
    lane.learn("job", ["a:1", ""], [1, 1], ["", ""])
