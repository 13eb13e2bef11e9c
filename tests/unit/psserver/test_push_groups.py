"""Which hyper-parameters an update uses, and how they are logged."""

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import PushKey, Staged
from pscommon.wal.log import Record
from psproto.v1 import log_pb2
from psserver.durability.shard_log import LoggedPush, logged, push_record
from psserver.parameters.push_groups import PushGroups, groups_of_update
from psserver.parameters.staging import Staging
from tests.support.stores import SGD, begun, model

SPEC = model(((4,), "float32"), optimizer=SGD)


def groups(lr: float, is_own: bool = True) -> PushGroups:
    return PushGroups(({"lr": lr},), f'[{{"lr": {lr}}}]', is_own)


def test_an_update_uses_the_hyper_parameters_of_the_smallest_worker_number() -> None:
    assert groups_of_update([(7, groups(1.0)), (3, groups(0.5)), (10_001, None)]) == groups(0.5)
    assert groups_of_update([(1, None), (2, groups(0.5))]) == groups(0.5)
    assert groups_of_update([(1, None), (2, None)]) is None


def test_a_log_of_earlier_releases_is_replayed_by_their_rule() -> None:
    """The first push of the update that has any; the update is ordered by rank."""
    pushes = [(7, groups(1.0, False)), (3, groups(0.5, False))]
    assert groups_of_update(pushes) == groups(1.0, False)
    assert groups_of_update([(9, None), *pushes]) == groups(1.0, False)


def test_each_text_is_parsed_once() -> None:
    store = begun(SPEC).stores[0]

    parsed = store.parse_groups('[{"lr":  0.5}]', "")

    assert store.parse_groups('[{"lr":  0.5}]', "") is parsed
    assert store.read_groups(parsed.text, "", True) == parsed
    assert parsed.values[0]["lr"] == 0.5
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="unknown hyper-parameter"):
            store.parse_groups('[{"rate": 0.5}]', "")


def staged_with(given: PushGroups | None) -> tuple[Staged, Staging]:
    (staging,) = begun(SPEC).stage({})
    staging.groups = given
    return Staged(PushKey(3, 1), 4, 0), staging


@pytest.mark.parametrize("is_own", [False, True])
def test_a_logged_push_keeps_its_hyper_parameters(is_own: bool) -> None:
    kind, header, _ = push_record(*staged_with(groups(0.5, is_own)))

    push = logged_push(kind, bytes(header))

    assert (push.groups_json, push.has_own_groups) == ('[{"lr": 0.5}]', is_own)


def test_a_push_of_an_earlier_release_has_no_mark() -> None:
    kind, header, _ = push_record(*staged_with(groups(0.5)))
    message = log_pb2.LoggedPush.FromString(bytes(header))
    message.ClearField("own_groups")

    assert not logged_push(kind, message.SerializeToString()).has_own_groups
    assert message.SerializeToString() != bytes(header)


def logged_push(kind: int, header: bytes) -> LoggedPush:
    push = logged(Record(kind, header, memoryview(b"")))
    assert isinstance(push, LoggedPush)
    return push
