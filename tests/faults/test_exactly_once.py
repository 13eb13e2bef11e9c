"""Each push counts once although calls are lost, repeated and reset and servers are killed."""

from pathlib import Path

import pytest

from tests.support.exactly_once import POLICIES, check, run

PUSHES = 1000
"""For each policy; `python -m tests.support.exactly_once --pushes 10000` for more."""


@pytest.mark.parametrize("policy", POLICIES)
def test_acknowledged_pushes_count_exactly_once(policy: str, tmp_path: Path) -> None:
    tally = run(tmp_path, policy, PUSHES)
    print(f"\n{policy}: {tally}")

    check(tally, policy, PUSHES)
