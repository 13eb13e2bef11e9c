"""The example notebook runs from its first to its last cell."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documentation_pages import ROOT
from tests.support.programs import Programs, programs_in

NOTEBOOK = ROOT / "psworker/examples/train_distributed.ipynb"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def test_the_notebook_reaches_its_accuracy(programs: Programs) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is an extra")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    programs.script("\n\n".join([*code, "assert test_accuracy > 0.9"]))

    program = programs.run("python", "train.py")

    assert len(code) == 4
    assert program.wait() == 0, program.output
