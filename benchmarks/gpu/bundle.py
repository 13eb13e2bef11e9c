"""Write the folder of the tests and benchmarks that need a GPU.

python -m benchmarks.gpu.bundle build/gpu-bundle --python 3.12 --machine x86_64
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
BENCHMARK = ("__init__", "machine", "gpu/__init__", "gpu/measure", "gpu/step")
"""Modules of `benchmarks` that the bundle has."""
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
GLIBC_MINOR_VERSIONS = range(5, 40)
MARK = re.compile(r"\bmark\.cuda\b")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version on the other machine (3.12)")
    parser.add_argument("--machine", default="x86_64", help="its processor, as uname -m prints it")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    write_sources(options.folder)
    write_wheels(options.folder / "wheels", options.python, options.machine)
    nbytes = sum(file.stat().st_size for file in options.folder.rglob("*") if file.is_file())
    print(f"{options.folder}: {nbytes / (1 << 20):.1f} MiB. Run there: python3 run.py")


def write_sources(folder: Path) -> None:
    """Copy the tests marked `cuda`, what they share, the benchmark, and run.py."""
    tests = [ROOT / "tests/conftest.py", *(ROOT / "tests/support").rglob("*.py")]
    benchmark = [ROOT / "benchmarks" / f"{name}.py" for name in BENCHMARK]
    for file in [ROOT / "pyproject.toml", *tests, *cuda_tests(), *benchmark]:
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    shutil.copyfile(Path(__file__).parent / "run.py", folder / "run.py")


def cuda_tests() -> list[Path]:
    """Return the test modules with tests that need a GPU."""
    return sorted(
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if MARK.search(file.read_text(encoding="utf-8"))
    )


def write_wheels(folder: Path, python: str, machine: str) -> None:
    """Build this project's wheel, and fetch those of its dependencies from the package index."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("hatchling", "build", "-t", "wheel", "-d", folder)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINOR_VERSIONS]
    platforms += [f"manylinux2014_{machine}", "any"]
    _run(
        *("pip", "download", "--quiet", "--disable-pip-version-check", "--dest", folder),
        *("--no-deps", "--only-binary", ":all:", "--implementation", "cp"),
        *("--python-version", python, "--constraint", ROOT / "constraints.txt"),
        *(f"--platform={platform}" for platform in platforms),
        *dependencies(),
    )


def _run(module: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=ROOT, check=True)


def dependencies() -> list[str]:
    """Return the packages that this project and its tests need, without torch, each once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = (Requirement(line).name for line in project["dependencies"])
    return sorted(set(_with_needs([*own, *TEST_PACKAGES], set())))


def _with_needs(names: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Yield the packages and, as this environment has them, those that they need."""
    for name in names:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key == "torch" or key in seen:
            continue
        seen.add(key)
        yield key
        found = map(Requirement, metadata.requires(name) or ())
        needs = (each for each in found if each.marker is None or each.marker.evaluate())
        yield from _with_needs((each.name for each in needs), seen)


if __name__ == "__main__":
    main()
