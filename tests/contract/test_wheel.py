"""The wheel that users install is built, inspected, installed in another environment and run."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.sources import ROOT

pytestmark = pytest.mark.full

PACKAGES = {"psserver", "psworker", "pscommon", "psproto"}


def run_outside_checkout(*command: str | Path, folder: Path) -> str:
    """Return the output of a successful command that runs without the checkout."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PS_", "VIRTUAL_ENV"))
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    run_outside_checkout(
        sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=ROOT
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, folder: Path) -> Path:
    """Install the wheel with this environment's dependencies; return the bin folder."""
    venv = folder / "venv"
    run_outside_checkout(sys.executable, "-m", "venv", "--without-pip", venv, folder=folder)
    python = venv / "bin/python"
    run_outside_checkout(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        folder=folder,
    )
    # path files in the folder of a path file are not read, so the checkout is not reachable
    site = run_outside_checkout(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder
    ).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def test_wheel_contains_exactly_our_packages(wheel: Path) -> None:
    """All four packages are complete and have type markers."""
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    ours = {name for name in names if name.partition("/")[0] not in metadata}
    sources = [
        ROOT / "psserver",
        ROOT / "psworker",
        ROOT / "common/pscommon",
        ROOT / "common/psproto",
    ]
    code = {
        str(path.relative_to(source.parent)) for source in sources for path in source.rglob("*.py*")
    }

    assert {name.partition("/")[0] for name in ours} == PACKAGES
    assert {f"{name}/py.typed" for name in PACKAGES - {"psproto"}} <= ours
    assert {name for name in code if not name.endswith(".pyc")} <= ours
    assert not [name for name in ours if "test" in name or "__pycache__" in name]


def test_imports_come_from_the_wheel(installed: Path, folder: Path) -> None:
    """Otherwise the next test could pass with the checkout."""
    code = (
        "import sys; from importlib import import_module; "
        "print(*(import_module(n).__file__ for n in sys.argv[1:]))"
    )
    files = run_outside_checkout(
        installed / "python", "-c", code, *sorted(PACKAGES), folder=folder
    ).split()

    assert len(files) == len(PACKAGES)
    assert [file for file in files if not file.startswith(str(folder))] == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("ps-server --help", "Usage: ps-server"),
        ("ps-worker --help", "Usage: ps-worker"),
        ("ps-run --help", "Usage: ps-run"),
        ("ps-ctl --help", "Usage: ps-ctl"),
        ("ps-ctl explain 11", "mismatch"),
    ],
)
def test_commands_run_from_the_wheel(
    installed: Path, folder: Path, command: str, says: str
) -> None:
    """The current folder is another one, and the checkout is not on the path."""
    name, *args = command.split()

    assert says in run_outside_checkout(installed / name, *args, folder=folder)
