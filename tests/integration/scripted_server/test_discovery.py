"""Finding all servers from some addresses over real connections; test_search tests the
algorithm.
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
def separate_servers() -> Iterator[FakeCluster]:
    """Servers that were started without --join."""
    with FakeCluster(shards=3, joined=False) as cluster:
        yield cluster


def failure(given: list[str], connect_timeout: float = 20.0, grace: float = 0.2) -> PSError:
    with pytest.raises(PSError) as caught:
        discover(given, connect_timeout, grace)
    return caught.value


@pytest.mark.parametrize("given", [[0], [1], [2], [2, 0], [0, 1, 2], [1, 2, 0]])
def test_any_address_leads_to_all_servers(cluster: FakeCluster, given: list[int]) -> None:
    found = discover([cluster.addresses[shard] for shard in given])

    assert list(found.addresses) == cluster.addresses
    assert found.job == "job-1"


def test_servers_without_join_are_introduced(separate_servers: FakeCluster) -> None:
    found = discover(list(reversed(separate_servers.addresses)))

    assert list(found.addresses) == separate_servers.addresses
    assert [server.introduced for server in separate_servers.servers] == [
        [],
        [separate_servers.addresses[0]],
        [separate_servers.addresses[0]],
    ]


def test_other_servers_get_the_own_address_of_shard_0(separate_servers: FakeCluster) -> None:
    separate_servers.servers[0].advertised = "parameter-server-0:50051"

    found = discover(separate_servers.addresses)

    assert separate_servers.servers[2].introduced == ["parameter-server-0:50051"]
    assert list(found.addresses) == separate_servers.addresses


def test_a_late_server_is_awaited(cluster: FakeCluster) -> None:
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


def test_a_silent_address_is_named(separate_servers: FakeCluster) -> None:
    error = failure([*separate_servers.addresses[:2], NOBODY], connect_timeout=0.3)

    assert type(error) is UnreachableError
    assert NOBODY in str(error)
    assert separate_servers.addresses[0] not in str(error)


def test_an_unneeded_silent_address_is_skipped(cluster: FakeCluster) -> None:
    assert list(discover([cluster.addresses[0], NOBODY]).addresses) == cluster.addresses


def test_no_server_at_all_is_an_error() -> None:
    error = failure([NOBODY], connect_timeout=0.3)

    assert (error.exit_code, error.reason) == (20, "UNREACHABLE")
    assert NOBODY in str(error)


def test_two_servers_with_one_shard_are_refused(cluster: FakeCluster) -> None:
    with FakeCluster(shards=3) as other:
        given = [cluster.addresses[0], cluster.addresses[1], other.addresses[1]]
        error = failure(given)

    assert (type(error), error.reason) == (MismatchError, "SHARD_MISMATCH")
    assert f"{cluster.addresses[1]} and {other.addresses[1]} are both shard 1 of 3" in str(error)


def test_two_names_of_one_server_are_refused(cluster: FakeCluster) -> None:
    port = cluster.addresses[1].rpartition(":")[2]

    assert len(discover([*cluster.addresses, f"localhost:{port}"]).addresses) == 3


def test_sets_of_two_sizes_are_refused(cluster: FakeCluster) -> None:
    with FakeCluster(shards=2) as other:
        error = failure([cluster.addresses[0], other.addresses[1]])

    assert (type(error), error.reason) == (MismatchError, "SHARD_MISMATCH")
    assert "shard 0 of 3" in str(error)
    assert "shard 1 of 2" in str(error)


def test_servers_of_two_jobs_are_refused(cluster: FakeCluster) -> None:
    with FakeCluster(shards=3) as other:
        for server in other.servers:
            server.job = "job-2"
        error = failure([cluster.addresses[0], other.addresses[1]])

    assert (type(error), error.reason) == (MismatchError, "JOB_MISMATCH")
    assert "job-1" in str(error)
    assert "job-2" in str(error)


def test_an_unknown_shard_is_reported(separate_servers: FakeCluster) -> None:
    error = failure(separate_servers.addresses[:2])

    assert (type(error), error.reason, error.exit_code) == (MismatchError, "SHARD_MISMATCH", 11)
    assert "no server knows the address of shard 2 of 3" in str(error)
    assert "--join" in str(error)
    assert separate_servers.servers[1].introduced == []


def test_an_unreachable_shard_0_is_reported(separate_servers: FakeCluster) -> None:
    error = failure([separate_servers.addresses[1]])

    assert (type(error), error.reason) == (MismatchError, "SHARD_MISMATCH")
    assert "no server knows the address of shards 0, 2 of 3" in str(error)


def test_one_server_can_be_described(cluster: FakeCluster) -> None:
    found = describe(cluster.addresses[2])

    assert (found.shard, found.shards, found.coordinator) == (2, 3, cluster.addresses[0])
    with pytest.raises(UnreachableError, match=NOBODY):
        describe(NOBODY)


@pytest.mark.parametrize("given", ["a:1,b:2", " a:1 , b:2,", ["a:1", "b:2"]])
def test_addresses_are_accepted_in_any_form(given: str | list[str]) -> None:
    assert addresses_of(given) == ("a:1", "b:2")


def test_ipv6_addresses_are_accepted() -> None:
    assert addresses_of("[::1]:50051") == ("[::1]:50051",)


@pytest.mark.parametrize(
    "given", ["localhost", "a:", "a:b", "a:0", "a:65536", "http://a:1", ":1", "", "a:1 b:2", []]
)
def test_an_invalid_address_is_refused(given: str | list[str]) -> None:
    with pytest.raises(InvalidRequestError):
        addresses_of(given)


def test_an_address_listed_twice_is_refused() -> None:
    with pytest.raises(MismatchError, match="a:1 is listed twice"):
        addresses_of("a:1,b:1,a:1")
