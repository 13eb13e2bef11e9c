"""JSON output of ps-ctl."""

import json
from typing import Any

import pytest

from psworker.ctl.cli import main as ps_ctl

Output = pytest.CaptureFixture[str]


def ctl(capsys: Output, *args: object) -> Any:
    """Run ps-ctl and return its JSON output."""
    capsys.readouterr()
    code = ps_ctl([*map(str, args), "--output", "json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)
