"""Reported values on their way to the servers: at most one per second and name, never waiting
for a device.
"""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import MAX_METRICS, MAX_NAME_CHARACTERS
from psworker.session.reports import ReportBuffer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class OnDevice:
    """Fake of a tensor on a GPU; it logs each read, which would wait for the GPU."""

    def __init__(self, value: float, log: list[float]) -> None:
        self.value, self.log = value, log
        self.device = torch.device("cuda:0")

    def detach(self) -> "OnDevice":
        return self

    def clone(self) -> "OnDevice":
        return OnDevice(self.value, self.log)

    def numel(self) -> int:
        return 1

    def __float__(self) -> float:
        self.log.append(self.value)
        return self.value


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reports(clock: Clock) -> ReportBuffer:
    return ReportBuffer(clock)


def unsent(reports: ReportBuffer) -> dict[str, float]:
    return {report.name: report.value for report in reports.unsent()}


def test_the_first_value_is_sent_and_the_next_one_a_second_later(
    reports: ReportBuffer, clock: Clock
) -> None:
    reports.add({"loss": 3.0}, version=1)
    sent = reports.unsent()
    assert [(report.name, report.value, report.version) for report in sent] == [("loss", 3.0, 1)]
    reports.confirm(sent)

    reports.add({"loss": 2.0}, version=2)
    reports.add({"loss": 1.0}, version=3)
    assert unsent(reports) == {}

    clock.now += 1.0
    assert [(report.value, report.version) for report in reports.unsent()] == [(1.0, 3)]
    assert reports.age(reports.unsent()[0]) == 1.0


def test_each_name_has_its_own_rate_limit(reports: ReportBuffer, clock: Clock) -> None:
    reports.add({"loss": 3.0}, 1)
    clock.now += 0.5
    reports.add({"loss": 2.0, "accuracy": 0.5}, 1)

    assert unsent(reports) == {"loss": 3.0, "accuracy": 0.5}


def test_an_unconfirmed_value_is_replaced_by_a_newer_one(
    reports: ReportBuffer, clock: Clock
) -> None:
    reports.add({"loss": 3.0}, 1)
    first = reports.unsent()
    clock.now += 1.0
    reports.add({"loss": 2.0}, 2)
    assert unsent(reports) == {"loss": 2.0}

    reports.confirm(first)

    assert unsent(reports) == {"loss": 2.0}


def test_a_device_is_read_once_a_second_and_only_by_the_reporting_thread(
    reports: ReportBuffer, clock: Clock
) -> None:
    log: list[float] = []
    for step in range(100):
        reports.add({"loss": OnDevice(float(step), log)}, step)
    assert log == [0.0]

    clock.now += 1.0
    assert unsent(reports) == {"loss": 0.0}  # a heartbeat
    assert log == [0.0]
    reports.settle()
    assert unsent(reports) == {"loss": 99.0}
    assert log == [0.0, 99.0]


def test_the_last_value_is_read_at_the_end(reports: ReportBuffer) -> None:
    log: list[float] = []
    reports.add({"loss": OnDevice(2.0, log)}, 1)
    reports.add({"loss": OnDevice(1.0, log)}, 2)

    reports.settle(final=True)

    assert unsent(reports) == {"loss": 1.0}


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        1,
        True,
        np.float32(0.5),
        np.array(0.5),
        torch.tensor(0.5),
        torch.tensor([[2]]),
        torch.tensor(0.5, requires_grad=True),
        torch.tensor(1.5, requires_grad=True) * 2,
    ],
)
def test_any_kind_of_number_is_accepted_without_a_warning(
    reports: ReportBuffer, value: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reports.add({"loss": value}, 1)

    assert isinstance(unsent(reports)["loss"], float)


def test_values_that_are_not_finite_are_sent(reports: ReportBuffer) -> None:
    reports.add({"loss": math.nan, "norm": torch.tensor(math.inf)}, 1)

    assert str(unsent(reports)) == "{'loss': nan, 'norm': inf}"


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"loss": torch.zeros(2)}, "takes one number, not 2"),
        ({"loss": "much"}, "takes a number: could not convert string to float"),
        ({"loss": None}, "takes a number: float"),
        ({"loss": 10**400}, "takes a number: int too large"),
        ({"loss": 1j}, "takes a number: "),
        ({"": 1.0}, "a name has 1 to 256 printable characters"),
        ({"x" * (MAX_NAME_CHARACTERS + 1): 1.0}, "a name has 1 to 256 printable characters"),
        ({"a\nb": 1.0}, "a name has 1 to 256 printable characters"),
        ({"\ud800": 1.0}, "a name has 1 to 256 printable characters"),
        (
            {f"n{i}": 1.0 for i in range(MAX_METRICS + 1)},
            f"more than {MAX_METRICS} different names",
        ),
    ],
)
def test_invalid_values_and_names_are_refused(
    reports: ReportBuffer, values: dict[str, Any], reported: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reported):
        reports.add(values, 1)
    assert unsent(reports) == {}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_values_on_a_gpu_are_copied_when_they_are_reported(
    reports: ReportBuffer, clock: Clock
) -> None:
    value = torch.zeros((), device="cuda")
    for _ in range(3):
        value += 1
        reports.add({"loss": value}, 1)
    assert unsent(reports) == {"loss": 1.0}
    clock.now += 1.0
    value += 1
    reports.settle()

    assert unsent(reports) == {"loss": 3.0}  # the buffer has a copy
