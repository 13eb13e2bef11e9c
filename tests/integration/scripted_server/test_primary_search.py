"""Where a worker searches the primary of a shard."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

import grpc
import pytest

from pscommon.core.errors import LayoutError, UnreachableError
from pscommon.wire.requests import AnyRequest, Stub
from psworker.transport.grpc_transport import GrpcTransport
from psworker.transport.server_addresses import ServerAddresses
from tests.support.fake_server import FakeCluster
from tests.support.ports import free_port
from tests.support.workers import until


@pytest.fixture
def places() -> ServerAddresses:
    """Return two shards at a and b; a has a standby at c."""
    places = ServerAddresses(["a", "b"], ["a", "b", "d"])
    assert places.learn(0, "a", 1, "c") == set()
    return places


def test_a_silent_primary_is_tried_alternately_with_its_standby(places: ServerAddresses) -> None:
    places.switch(0, "a")
    assert places.addresses == ("c", "b")
    places.switch(0, "a")  # an earlier request of another thread
    assert places.addresses == ("c", "b")
    places.switch(0, "c")
    assert places.addresses == ("a", "b")


def test_the_primary_is_remembered_while_its_standby_is_tried(places: ServerAddresses) -> None:
    """It was away for a moment and is still primary: heartbeats name it and its standby."""
    places.switch(0, "a")
    assert places.learn_from_shard_0(0, "a", 1, "c") == set()
    assert places.addresses == ("c", "b")

    places.switch(0, "c")

    assert places.addresses == ("a", "b")
    places.switch(0, "a")
    assert places.addresses == ("c", "b")


def test_an_unserved_shard_is_searched_at_the_standby_that_others_name(
    places: ServerAddresses,
) -> None:
    assert places.learn(1, "b", 1) == set()
    assert places.learn_from_shard_0(1, "", 1, "e") == set()

    places.switch(1, "b")

    assert places.addresses == ("a", "e")


def test_without_a_standby_there_is_no_other_address(places: ServerAddresses) -> None:
    places.switch(1, "b")

    assert places.addresses == ("a", "b")


def test_a_higher_term_voids_the_former_address(places: ServerAddresses) -> None:
    assert places.learn(0, "c", 2) == {"a"}
    assert places.addresses == ("c", "b")
    assert places.learn(0, "a", 1) == set()
    assert places.addresses == ("c", "b")


def test_an_address_found_by_trying_is_voided_too(places: ServerAddresses) -> None:
    places.switch(0, "a")

    assert places.learn(0, "c", 2, "a2") == {"a"}


def test_the_first_message_of_a_term_changes_no_address(places: ServerAddresses) -> None:
    """An address from the user is reachable; the one that a server states may not be."""
    assert places.learn(1, "advertised", 1) == set()
    assert places.addresses == ("a", "b")


def test_a_restart_at_another_address_is_followed_within_its_term(places: ServerAddresses) -> None:
    # b is another name of the same server
    assert places.learn_from_shard_0(1, "b-as-advertised", 0, "") == set()
    assert places.learn_from_shard_0(1, "b-as-advertised", 1, "") == set()
    assert places.addresses == ("a", "b")

    assert places.learn_from_shard_0(1, "", 1, "") == set()  # the primary does not answer
    assert places.learn_from_shard_0(1, "b2", 1, "e") == {"b"}
    assert places.addresses == ("a", "b2")
    places.switch(1, "b2")
    assert places.addresses == ("a", "e")


def test_a_restart_at_another_address_before_its_term_is_known_is_followed() -> None:
    places = ServerAddresses(["a", "b"], ["a"])  # a has stated the address b
    assert places.learn_from_shard_0(1, "b2", 1, "") == {"b"}
    assert places.addresses == ("a", "b2")


def test_after_a_reshard_the_stated_addresses_are_used(places: ServerAddresses) -> None:
    places.relocate(["a", "b", "x"])
    assert places.learn_from_shard_0(2, "y", 1, "") == {"x"}


def test_a_restart_of_a_primary_with_a_lower_term_is_ignored(places: ServerAddresses) -> None:
    places.learn_from_shard_0(1, "c", 2, "")
    assert places.learn_from_shard_0(1, "b2", 1, "") == set()
    assert places.addresses == ("a", "c")


def test_a_late_message_of_a_deposed_shard_0_changes_no_address() -> None:
    with closing(GrpcTransport(["a:1", "b:1"])) as lane:
        lane.learn("job", ["a2:1", "b2:1"], [2, 1], ["", ""])
        assert lane.addresses == ("a2:1", "b2:1")
        lane.learn("job", ["a:1", "b:1"], [1, 1], ["", ""])
        assert lane.addresses == ("a2:1", "b2:1")


def test_an_answer_of_a_lower_term_is_refused(places: ServerAddresses) -> None:
    places.check(0, 2)

    with pytest.raises(UnreachableError, match=r"term 1.* term 2") as refused:
        places.check(0, 1)
    assert refused.value.reason == "NOT_PRIMARY"


def test_all_possible_addresses_are_listed(places: ServerAddresses) -> None:
    assert places.known_addresses == ["a", "b", "d", "c"]


def test_another_number_of_servers_is_reported_to_each_exchange(places: ServerAddresses) -> None:
    assert places.count(2)
    places.check_shard_count()

    assert not places.count(1)
    with pytest.raises(LayoutError, match="the job has 1 servers now, not 2"):
        places.check_shard_count()
    places.relocate(["a"])
    places.check_shard_count()


def test_the_search_tolerates_a_connection_closed_by_another_thread() -> None:
    """For example by a thread that has found a new primary; the heartbeats must continue."""
    with closing(GrpcTransport([f"127.0.0.1:{free_port()}"])) as lane:
        assert not lane.find_primaries("job", 0.1)
        for line in lane._channels.values():
            line.cancel()
        assert not lane.find_primaries("job", 0.1)


def test_a_connection_is_not_closed_before_all_its_stubs_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stub on a closed channel would crash in C."""
    leaving: list[Future[None]] = []
    early: list[object] = []

    def making(channel: grpc.Channel, row: AnyRequest) -> Any:
        if not leaving:
            leaving.append(pool.submit(lane.relocate, []))
            early.extend(wait(leaving, 0.1).done)
        return Stub(channel, row)

    monkeypatch.setattr("psworker.transport.grpc_exchanges.Stub", making)
    with (
        closing(GrpcTransport([f"127.0.0.1:{free_port()}"])) as lane,
        ThreadPoolExecutor(1) as pool,
    ):
        lane.find_primaries("job", 0.1)
    assert not early


def test_a_shard_without_the_address_of_shard_0_is_introduced() -> None:
    """Its standby may have taken over before all shards knew it. Repeated until it succeeds."""
    with FakeCluster(shards=2) as cluster, closing(GrpcTransport(cluster.addresses)) as lane:
        lane.learn("job", ["", cluster.addresses[1]], [1, 1], ["", ""])
        lane.learn("job", [cluster.addresses[0], ""], [1, 1], ["", ""])
        until(lambda: cluster.servers[1].introduced, "an introduction")
        lane.learn("job", cluster.addresses, [1, 1], ["", ""])
    assert cluster.servers[1].introduced == [cluster.addresses[0]]


def test_no_server_is_introduced_over_a_closed_connection() -> None:
    """A heartbeat may receive its answer after the close."""
    lane = GrpcTransport(["a:1", "b:1"])
    lane.close()
    lane.learn("job", ["a:1", ""], [1, 1], ["", ""])
