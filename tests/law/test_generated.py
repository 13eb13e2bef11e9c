"""common/psproto is what proto/generate makes of proto/, byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import ROOT


@pytest.fixture
def generator(tmp_path: Path) -> Path:
    """Return the folder of the pinned generator, in the environment that runs the tests."""
    return Path(sys.prefix if sys.prefix != sys.base_prefix else tmp_path) / "proto-env"


def has_generator(env: Path) -> bool:
    python = env / "bin/python"
    return (
        python.exists()
        and subprocess.run([python, "-c", "import grpc_tools, mypy_protobuf"]).returncode == 0
    )


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".pyi")]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.mark.full
@pytest.mark.timeout(300)  # the first time the generator is installed
def test_generated_code_is_fresh(tmp_path: Path, generator: Path) -> None:
    """It fails after an edit of proto/ without `make proto`, and after an edit of
    generated code.
    """
    command = [ROOT / "proto/generate", tmp_path, generator]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    if done.returncode and not has_generator(generator):
        pytest.skip(f"the generator cannot be installed here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr

    made, committed = contents(tmp_path / "psproto"), contents(ROOT / "common/psproto")

    assert made.keys() == committed.keys()
    assert [name for name in made if made[name] != committed[name]] == []
