"""Machine time leaves out pauses of the machine."""

import pytest

from tests.support.machine_time import PAUSE_SECONDS, POLL_SECONDS, Standstills

BEGAN = 100.0


@pytest.mark.parametrize(
    ("since", "to", "seconds"),
    [
        (100.0, 101.0, 1.0),  # before
        (100.0, 110.0, 5.0),  # around the whole of it
        (103.0, 110.0, 3.0),  # from its midst
        (100.0, 104.0, 2.0),  # into its midst
        (103.0, 105.0, 0.0),  # within
        (108.0, 110.0, 2.0),  # after
    ],
)
def test_a_pause_of_the_machine_is_left_out(since: float, to: float, seconds: float) -> None:
    machine = Standstills(BEGAN)
    looks = [BEGAN + POLL_SECONDS * number for number in range(1, 101)]  # until 102
    looks += [107.0 + POLL_SECONDS * number for number in range(200)]
    for now in looks:
        machine.observe(now)

    assert machine.running(since, to) == pytest.approx(seconds)


def test_short_delays_of_a_busy_machine_count() -> None:
    machine = Standstills(BEGAN)
    for number in range(1, 100):
        machine.observe(BEGAN + 0.9 * PAUSE_SECONDS * number)

    assert machine.running(BEGAN, BEGAN + 5.0) == 5.0
