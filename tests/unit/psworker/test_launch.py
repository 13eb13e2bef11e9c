"""Arguments of `psworker.launch` that are refused before any process starts."""

from typing import Any

import pytest
import torch

import psworker
from psworker.run import from_python


def train() -> None:
    pytest.fail("a worker ran in the process of the test")


@pytest.fixture(autouse=True)
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests in this process connect to servers; these ones fork nothing."""
    monkeypatch.setattr(from_python, "is_used", lambda: False)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"servers": 0}, "--servers"),
        ({"polic": "sync"}, "--polic"),
        ({"policy": "never"}, "--policy"),
        ({"policy": "ssp"}, "staleness"),
        ({"min_workers": 5}, "--min-workers 5"),
        ({"group_size": 2}, "group_size"),
        ({"summary": "/missing/file"}, "--summary"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(psworker.InvalidRequestError, match=part):
        psworker.launch(train, **settings)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(psworker.InvalidRequestError, match="fn='train' is not valid"):
        psworker.launch("train")  # type: ignore[arg-type]


def test_a_process_that_was_connected_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_python, "is_used", lambda: True)

    with pytest.raises(psworker.InvalidRequestError, match="has used connections to servers"):
        psworker.launch(train)


def test_a_process_that_used_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    with pytest.raises(psworker.InvalidRequestError, match="has used a GPU"):
        psworker.launch(train)
