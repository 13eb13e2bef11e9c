"""The keys of workers, and the file with the job key."""

from pathlib import Path

import pytest

from pscommon.core.errors import (
    AuthenticationError,
    FencedError,
    InvalidRequestError,
    PSError,
    SnapshotError,
    UnreachableError,
)
from psserver.process.job_files import stored_job_key
from psserver.process.worker_keys import JOB_KEY_BYTES, MAX_VALID_KEYS, WorkerKeys

JOB_KEY, OTHER = bytes(range(JOB_KEY_BYTES)), bytes(JOB_KEY_BYTES)


def keys_of(job_key: bytes, shard: int = 0) -> WorkerKeys:
    made = WorkerKeys(shard)
    made.learn(job_key)
    return made


def refusal(keys: WorkerKeys, worker: int, key: bytes) -> type[PSError] | None:
    try:
        keys.check(worker, key)
    except PSError as error:
        return type(error)
    return None


@pytest.mark.parametrize("shard", [0, 1])
def test_a_key_is_that_of_one_worker_and_one_job_key(shard: int) -> None:
    keys, other = keys_of(JOB_KEY, shard), keys_of(OTHER)
    own = keys.key_of(7)
    assert not keys.is_valid(7, own)
    assert refusal(keys, 7, own) is None
    assert keys.is_valid(7, own)
    assert not keys.is_valid(7, keys.key_of(8))
    for wrong in (b"", b"x", own[:-1], own + b"x", keys.key_of(8), own[:8] + bytes(32)):
        assert refusal(keys, 7, wrong) is AuthenticationError, wrong
    expected = UnreachableError if shard else FencedError
    assert refusal(keys, 7, other.key_of(7)) is expected
    assert refusal(keys, 0, b"") is None


def test_a_shard_without_the_job_key_is_not_ready() -> None:
    keys, own = WorkerKeys(1), keys_of(JOB_KEY).key_of(7)
    with pytest.raises(UnreachableError) as caught:
        keys.check(7, own)
    assert caught.value.reason == "NOT_READY"
    keys.learn(JOB_KEY)
    keys.check(7, own)


def test_a_new_job_key_ends_earlier_keys() -> None:
    keys = keys_of(JOB_KEY)
    keys.check(7, own := keys.key_of(7))
    keys.learn(OTHER)
    assert not keys.is_valid(7, own)
    assert refusal(keys, 7, own) is FencedError


def test_each_shard_0_makes_a_key_of_its_own() -> None:
    first, second = WorkerKeys(0).job_key, WorkerKeys(0).job_key
    assert len(first) == JOB_KEY_BYTES
    assert first != second


def test_the_job_key_is_stored_once_for_its_owner_only(tmp_path: Path) -> None:
    """Also in the data directory of an earlier release, which has none."""
    path = tmp_path / "job-key"
    assert stored_job_key(None, JOB_KEY) == JOB_KEY
    assert stored_job_key(tmp_path, JOB_KEY) == JOB_KEY
    assert path.stat().st_mode & 0o777 == 0o600
    assert stored_job_key(tmp_path, OTHER) == JOB_KEY
    path.chmod(0o660)
    assert stored_job_key(tmp_path, OTHER) == JOB_KEY
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(InvalidRequestError, match="mode 0604"):
        stored_job_key(tmp_path, OTHER)


def test_a_damaged_job_key_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "job-key"
    for text in ("", "00", "no key"):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(SnapshotError, match=f"Try: `rm {path}`"):
            stored_job_key(tmp_path, OTHER)


def test_a_job_continues_if_the_disk_refuses_the_job_key(tmp_path: Path) -> None:
    assert stored_job_key(tmp_path / "missing", JOB_KEY) == JOB_KEY


def test_presented_keys_take_bounded_memory() -> None:
    """A worker whose key was forgotten is checked again."""
    keys = WorkerKeys(0)
    for worker in range(1, 2 * MAX_VALID_KEYS):
        keys.check(worker, keys.key_of(worker))

    assert len(keys._valid) <= MAX_VALID_KEYS
    assert keys.is_valid(2 * MAX_VALID_KEYS - 1, keys.key_of(2 * MAX_VALID_KEYS - 1))
    assert not keys.is_valid(1, keys.key_of(1))
    keys.check(1, keys.key_of(1))
    assert keys.is_valid(1, keys.key_of(1))
