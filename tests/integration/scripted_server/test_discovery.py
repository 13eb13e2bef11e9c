"""Finding all servers from some of their addresses, over real connections; the machine alone is
in test_search.
"""

import threading
from collections.abc import Iterator

import pytest

from pscommon.core.errors import InvalidRequestError, MismatchError, PSError, UnreachableError
from psworker.connection.discovery import addresses_of, describe, discover
from tests.support.fake_server import FakeCluster

NOBODY = "127.0.0.1:1"


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=3) as cluster:
        yield cluster


@pytest.fixture
def apart() -> Iterator[FakeCluster]:
    """Servers that were started without --join."""
    with FakeCluster(shards=3, joined=False) as cluster:
        yield cluster


def failure(given: list[str], connect_timeout: float = 20.0, grace: float = 0.2) -> PSError:
    with pytest.raises(PSError) as caught:
        discover(given, connect_timeout, grace)
    return caught.value


@pytest.mark.parametrize("given", [[0], [1], [2], [2, 0], [0, 1, 2], [1, 2, 0]])
def test_any_address_leads_to_all(cluster: FakeCluster, given: list[int]) -> None:
    found = discover([cluster.addresses[shard] for shard in given])

    assert list(found.addresses) == cluster.addresses
    assert found.job == "job-1"


def test_servers_that_do_not_know_each_other_are_introduced(apart: FakeCluster) -> None:
    found = discover(list(reversed(apart.addresses)))

    assert list(found.addresses) == apart.addresses
    assert [server.introduced for server in apart.servers] == [
        [],
        [apart.addresses[0]],
        [apart.addresses[0]],
    ]


def test_own_name_of_shard_0_is_what_others_are_told(apart: FakeCluster) -> None:
    apart.servers[0].advertised = "parameter-server-0:50051"

    found = discover(apart.addresses)

    assert apart.servers[2].introduced == ["parameter-server-0:50051"]
    assert list(found.addresses) == apart.addresses


def test_late_server_is_waited_for(cluster: FakeCluster) -> None:
    late = cluster.servers[2]
    late.job, late.coordinator = "", cluster.addresses[0]
    asked = threading.Thread(target=_join_after, args=(cluster, 4))
    asked.start()
    found = discover([cluster.addresses[0]], grace=0.0)
    asked.join(20)

    assert list(found.addresses) == cluster.addresses


def _join_after(cluster: FakeCluster, calls: int) -> None:
    cluster.servers[2].known = None
    cluster.changed.acquire()
    while cluster.calls["Describe"] < calls:
        cluster.changed.wait(0.01)
    cluster.changed.release()
    cluster.servers[2].job = cluster.job


def test_silent_address_is_named(apart: FakeCluster) -> None:
    error = failure([*apart.addresses[:2], NOBODY], connect_timeout=0.3)

    assert type(error) is UnreachableError
    assert NOBODY in str(error)
    assert apart.addresses[0] not in str(error)


def test_silent_address_that_nobody_needs_is_passed_over(cluster: FakeCluster) -> None:
    assert list(discover([cluster.addresses[0], NOBODY]).addresses) == cluster.addresses


def test_no_server_at_all() -> None:
    error = failure([NOBODY], connect_timeout=0.3)

    assert (error.exit_code, error.reason) == (20, "UNREACHABLE")
    assert NOBODY in str(error)


def test_two_servers_with_one_shard(cluster: FakeCluster) -> None:
    with FakeCluster(shards=3) as other:
        given = [cluster.addresses[0], cluster.addresses[1], other.addresses[1]]
        error = failure(given)

    assert (type(error), error.reason) == (MismatchError, "SHARD_MISMATCH")
    assert f"{cluster.addresses[1]} and {other.addresses[1]} are both shard 1 of 3" in str(error)


def test_two_names_of_one_server(cluster: FakeCluster) -> None:
    port = cluster.addresses[1].rpartition(":")[2]

    assert len(discover([*cluster.addresses, f"localhost:{port}"]).addresses) == 3


def test_sets_of_two_sizes(cluster: FakeCluster) -> None:
    with FakeCluster(shards=2) as other:
        error = failure([cluster.addresses[0], other.addresses[1]])

    assert (type(error), error.reason) == (MismatchError, "SHARD_MISMATCH")
    assert "shard 0 of 3" in str(error)
    assert "shard 1 of 2" in str(error)


def test_two_jobs(cluster: FakeCluster) -> None:
    with FakeCluster(shards=3) as other:
        for server in other.servers:
            server.job = "job-2"
        error = failure([cluster.addresses[0], other.addresses[1]])

    assert (type(error), error.reason) == (MismatchError, "JOB_MISMATCH")
    assert "job-1" in str(error)
    assert "job-2" in str(error)


def test_shard_that_nobody_knows(apart: FakeCluster) -> None:
    error = failure(apart.addresses[:2])

    assert (type(error), error.reason, error.exit_code) == (MismatchError, "SHARD_MISMATCH", 11)
    assert "no server knows the address of shard 2 of 3" in str(error)
    assert "--join" in str(error)
    assert apart.servers[1].introduced == []


def test_no_way_to_shard_0(apart: FakeCluster) -> None:
    error = failure([apart.addresses[1]])

    assert (type(error), error.reason) == (MismatchError, "SHARD_MISMATCH")
    assert "no server knows the address of shards 0, 2 of 3" in str(error)


def test_describe_one_server(cluster: FakeCluster) -> None:
    found = describe(cluster.addresses[2])

    assert (found.shard, found.shards, found.coordinator) == (2, 3, cluster.addresses[0])
    with pytest.raises(UnreachableError, match=NOBODY):
        describe(NOBODY)


@pytest.mark.parametrize("given", ["a:1,b:2", " a:1 , b:2,", ["a:1", "b:2"]])
def test_addresses_in_any_form(given: str | list[str]) -> None:
    assert addresses_of(given) == ("a:1", "b:2")


def test_address_of_ipv6() -> None:
    assert addresses_of("[::1]:50051") == ("[::1]:50051",)


@pytest.mark.parametrize(
    "given", ["localhost", "a:", "a:b", "a:0", "a:65536", "http://a:1", ":1", "", "a:1 b:2", []]
)
def test_what_is_no_address(given: str | list[str]) -> None:
    with pytest.raises(InvalidRequestError):
        addresses_of(given)


def test_address_listed_twice() -> None:
    with pytest.raises(MismatchError, match="a:1 is listed twice"):
        addresses_of("a:1,b:1,a:1")
