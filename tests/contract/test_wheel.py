"""What users install is the wheel, not the checkout: so it is built, looked into, installed
elsewhere and run.
"""

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


def run(*command: str | Path, folder: Path) -> str:
    """Output of a command that must succeed, in a folder and an environment that know nothing of
    the checkout.
    """
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
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, folder: Path) -> Path:
    """bin folder of an environment with the wheel in it, whose dependencies are this one's."""
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, folder=folder)
    python = venv / "bin/python"
    run(
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
    # a path file's folder is searched for modules but its own path files are not read: no way back
    # to the checkout
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder
    ).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def test_contents(wheel: Path) -> None:
    """Our four packages whole, with their type markers, and nothing else."""
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
    """The check behind the next test: it would otherwise pass on the checkout."""
    code = (
        "import sys; from importlib import import_module; "
        "print(*(import_module(n).__file__ for n in sys.argv[1:]))"
    )
    files = run(installed / "python", "-c", code, *sorted(PACKAGES), folder=folder).split()

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
def test_commands_run(installed: Path, folder: Path, command: str, says: str) -> None:
    """From another folder, without the checkout on the path."""
    name, *args = command.split()

    assert says in run(installed / name, *args, folder=folder)
