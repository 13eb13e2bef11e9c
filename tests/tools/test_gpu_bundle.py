"""The bundle for a machine with a GPU: what it has, and its programs as far as a CPU runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import bundle, measure
from tests.support.sources import ROOT


def collected(folder: Path) -> set[str]:
    """Return the tests that need a GPU in a copy of the project."""
    files = [str(file.relative_to(ROOT)) for file in bundle.cuda_tests()]
    command = (sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-m", "cuda", *files)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_it_has_all_tests_that_need_a_gpu(tmp_path: Path) -> None:
    bundle.write_sources(tmp_path)

    found = collected(tmp_path)

    assert len(found) > 60
    assert found == collected(ROOT)
    assert (tmp_path / "run.py").exists()


def test_its_wheels_are_pinned_and_without_torch() -> None:
    names = bundle.dependencies()

    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in constraints()}
    assert {"grpcio", "numpy", "pytest", "packaging"} <= set(names) <= pinned
    assert "torch" not in names


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if "==" in line]


@pytest.mark.parametrize("case", measure.CASES[1::4], ids=lambda case: case.name)
def test_the_benchmark_measures_a_step(case: measure.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    found = measure.steps(case, "cpu", measure.SMALL)

    assert {"compute ms", "step ms", "push ms", "wait ms", "apply ms", "pull ms"} == set(found)
    assert min(found["compute ms"], found["step ms"], found["push ms"]) > 0
