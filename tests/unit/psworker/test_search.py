"""The search for servers as a state machine, without sockets and clock."""

import itertools
from dataclasses import replace

import pytest

from pscommon.core.errors import MismatchError, UnreachableError
from psworker.core.server_search import ServerDescription, ServerSearch

GRACE = 5.0


def described(
    shard: int,
    shards: int = 3,
    job: str = "j",
    knows: dict[int, str] | None = None,
    follows: str = "s0:1",
) -> ServerDescription:
    """Return the answer of the server s<shard>:1, which knows itself and the given servers."""
    known = {shard: f"s{shard}:1"} | (knows or {})
    return ServerDescription(
        job, shard, shards, tuple(known.get(i, "") for i in range(shards)), follows
    )


ALL_SERVERS = {i: f"s{i}:1" for i in range(3)}


def test_only_the_given_addresses_are_asked_first() -> None:
    assert ServerSearch(["s1:1", "s2:1"], 0.0, GRACE).to_ask() == ["s1:1", "s2:1"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_answers_in_any_order_complete_the_search(order: tuple[int, ...]) -> None:
    search = ServerSearch([f"s{order[0]}:1"], 0.0, GRACE)
    for shard in order:
        assert not search.complete
        search.answered(f"s{shard}:1", described(shard, knows=ALL_SERVERS), 0.0)

    assert search.complete
    assert search.to_ask() == []
    assert search.cluster().addresses == ("s0:1", "s1:1", "s2:1")


def test_the_search_leads_from_a_shard_to_shard_0_to_all_shards() -> None:
    search = ServerSearch(["s2:1"], 0.0, GRACE)
    search.answered("s2:1", described(2), 0.0)
    assert search.has_unasked()
    assert search.to_ask() == ["s0:1", "s2:1"]
    assert not search.has_unasked()
    search.answered("s0:1", described(0, knows=ALL_SERVERS), 0.0)

    assert search.to_ask() == ["s1:1", "s2:1", "s0:1"]


def test_a_given_address_takes_precedence_over_the_advertised_one() -> None:
    search = ServerSearch(["localhost:9"], 0.0, GRACE)
    search.answered("localhost:9", described(0, shards=1), 0.0)

    assert search.cluster().addresses == ("localhost:9",)


@pytest.mark.parametrize("nowhere", ["0.0.0.0:1", "[::]:1"])
def test_an_address_of_all_interfaces_is_not_asked(nowhere: str) -> None:
    search = ServerSearch(["s0:1"], 0.0, GRACE)
    search.answered("s0:1", described(0, knows={1: nowhere}, shards=2), 0.0)

    assert nowhere not in search.to_ask()


def test_addresses_from_shard_0_take_precedence() -> None:
    search = ServerSearch(["s1:1"], 0.0, GRACE)
    search.answered("s1:1", described(1, knows={2: "old:1"}), 0.0)
    search.answered("s0:1", described(0, knows=ALL_SERVERS), 0.0)

    assert "s2:1" in search.to_ask()
    assert "old:1" not in search.to_ask()


def test_servers_are_introduced_once_all_are_found() -> None:
    search = ServerSearch(["s0:1", "s1:1", "s2:1"], 0.0, GRACE)
    search.answered("s0:1", described(0), 0.0)
    search.answered("s1:1", described(1, job="", follows=""), 0.0)
    assert search.introductions() == []
    search.answered("s2:1", described(2, job="", follows=""), 0.0)
    assert search.introductions() == [("s1:1", "s0:1"), ("s2:1", "s0:1")]
    assert not search.complete
    search.answered("s1:1", described(1, job=""), 0.0)

    assert search.introductions() == [("s2:1", "s0:1")]


def test_a_server_on_all_interfaces_is_introduced_by_its_given_address() -> None:
    search = ServerSearch(["a:1", "b:1"], 0.0, GRACE)
    search.answered("a:1", ServerDescription("j", 0, 2, ("0.0.0.0:1", ""), "0.0.0.0:1"), 0.0)
    search.answered("b:1", ServerDescription("", 1, 2, ("", "0.0.0.0:1"), ""), 0.0)

    assert search.introductions() == [("b:1", "a:1")]


def test_missing_shards_are_named_at_the_timeout() -> None:
    search = ServerSearch(["s0:1"], 0.0, GRACE)
    search.answered("s0:1", described(0), 0.0)
    search.check(now=1000.0)

    error = search.gave_up(60.0)
    assert isinstance(error, MismatchError)
    assert "s0:1 is shard 0; no server knows the address of shards 1, 2 of 3" in str(error)


def test_new_information_restarts_the_grace_period() -> None:
    search = ServerSearch(["s0:1", "s1:1"], 0.0, GRACE)
    search.answered("s0:1", described(0), 0.0)
    search.answered("s1:1", described(1, follows=""), 4.0)
    search.answered("s0:1", described(0), 6.0)
    search.check(now=8.9)
    with pytest.raises(MismatchError, match="shard 2 of 3"):
        search.check(now=9.0)


def test_a_silent_address_may_be_the_missing_shard() -> None:
    search = ServerSearch(["s0:1", "x:1"], 0.0, GRACE)
    search.answered("s0:1", described(0), 0.0)
    search.failed("x:1", "refused")
    search.check(now=1000.0)

    error = search.gave_up(60.0)
    assert isinstance(error, UnreachableError)
    assert str(error) == "no answer within 60 s from x:1: refused"


def test_a_server_that_no_longer_answers_is_named_at_the_timeout() -> None:
    """The address of another shard is unknown to all servers."""
    search = ServerSearch(["s0:1"], 0.0, GRACE)
    search.answered("s0:1", described(0, shards=2), 0.0)
    search.failed("s0:1", "refused")
    search.check(now=1000.0)

    error = search.gave_up(60.0)
    assert isinstance(error, UnreachableError)
    assert str(error) == "no answer within 60 s from s0:1: refused"
    search.answered("s0:1", described(0, shards=1, job="another"), 61.0)
    assert search.cluster().job == "another"


def test_a_second_server_of_a_shard_is_refused() -> None:
    search = ServerSearch(["s0:1", "stray:1"], 0.0, GRACE)
    search.answered("s0:1", described(0, shards=2, knows={1: "s1:1"}), 0.0)
    search.answered("stray:1", ServerDescription("", 1, 2, ("", "stray:1"), "s0:1"), 0.0)
    search.check(now=4.9)
    with pytest.raises(MismatchError, match=r"stray:1 .*shard 1.* s0:1 .* s1:1") as caught:
        search.check(now=5.0)
    assert caught.value.reason == "SHARD_MISMATCH"


def test_a_shard_that_has_not_joined_is_named() -> None:
    search = ServerSearch(["s0:1"], 0.0, GRACE)
    search.answered("s0:1", described(0, shards=2, knows={1: "s1:1"}), 0.0)
    search.answered("s1:1", described(1, shards=2, job=""), 0.0)

    assert not search.complete
    assert "shard 1 at s1:1 has not joined shard 0 at s0:1 within 60 s" in str(search.gave_up(60.0))


def test_an_invalid_shard_number_is_refused() -> None:
    with pytest.raises(MismatchError, match="shard 3 of 3"):
        ServerSearch(["a:1"], 0.0, GRACE).answered("a:1", ServerDescription("j", 3, 3, (), ""), 0.0)


def test_a_server_may_change_its_job_but_not_its_shard_count() -> None:
    search = ServerSearch(["s0:1"], 0.0, GRACE)
    search.answered("s0:1", described(0, shards=2), 0.0)
    search.answered("s0:1", described(0, shards=2, job="restarted"), 0.0)
    with pytest.raises(MismatchError, match=r"0 of 2.* 0 of 4") as caught:
        search.answered("s0:1", described(0, shards=4), 0.0)
    assert caught.value.reason == "SHARD_MISMATCH"


def test_during_a_reshard_the_newest_shard_count_counts() -> None:
    """From 2 to 3 shards one server does not know the reshard yet; from 2 to 1 one was removed."""
    search = ServerSearch(["s1:1", "s0:1"], 0.0, GRACE)
    search.answered("s1:1", described(1, shards=2, knows=ALL_SERVERS), 0.0)
    search.answered("s0:1", replace(described(0, knows=ALL_SERVERS), reshard_count=1), 0.0)
    assert not search.complete
    search.answered("s2:1", replace(described(2, knows=ALL_SERVERS), reshard_count=1), 0.0)
    assert search.cluster().addresses == ("s0:1", "s1:1", "s2:1")

    fewer = ServerSearch(["s1:1", "s0:1"], 0.0, GRACE)
    fewer.answered("s1:1", described(1, shards=2), 0.0)
    fewer.answered("s0:1", replace(described(0, shards=1), reshard_count=1), 0.0)
    assert fewer.cluster().addresses == ("s0:1",)


def test_a_server_removed_by_a_reshard_is_ignored() -> None:
    """From 3 shards to 1, two removed servers still run."""
    search = ServerSearch(["s2:1", "s1:1", "s0:1"], 0.0, GRACE)
    search.answered(
        "s2:1", replace(described(2, shards=1, knows={0: "s0:1"}), reshard_count=1), 0.0
    )
    search.answered("s1:1", described(1, shards=3), 0.0)
    search.answered("s0:1", replace(described(0, shards=1), reshard_count=1), 0.0)
    assert search.cluster().addresses == ("s0:1",)
    search.check(GRACE)
