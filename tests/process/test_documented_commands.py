"""Every command in a shell block of these pages runs, except targets of make.

Each section starts in an empty folder with the page's files. If the title of a block names a
terminal and the block starts a server or worker, it stays running; each of these must exit with 0.
A second machine is a network namespace.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.link import inside, missing
from tests.support.documentation_pages import ROOT, Block, blocks
from tests.support.namespaces import Cable
from tests.support.programs import BIN, Program, Programs, programs_in

COMPLETE = (ROOT / "README.md", ROOT / "docs/tutorial.md")
"""Pages that name the language of each block."""

OPERATIONS = ROOT / "docs/operations"
PARALLELISM = ROOT / "docs/parallelism.md"
PAGES = (*COMPLETE, OPERATIONS / "deploy.md", OPERATIONS / "security.md", PARALLELISM)
LIMIT = 200.0

SECTIONS = [
    pytest.param(page, section, id=f"{page.stem}: {section}")
    for page in PAGES
    for section in dict.fromkeys(block.section for block in blocks(page) if block.language == "sh")
]

pytestmark = [pytest.mark.full, pytest.mark.timeout(2 * LIMIT)]


@pytest.fixture
def machines() -> Iterator[list[tuple[str, ...]]]:
    """Yield the command prefixes of machines 1 and 2; an empty list without network namespaces."""
    if missing():
        yield []
        return
    with Cable() as cable:
        names = (cable.server, cable.worker)
        for number, name in enumerate(names, 1):
            address = ("ip", "-n", name, "address", "add", f"10.0.0.{number}/24", "dev", "veth0")
            subprocess.run(address, check=True)
        yield [inside(name) for name in names]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


class SectionRunner:
    """Runs the commands of one section."""

    def __init__(self, programs: Programs, machines: list[tuple[str, ...]]) -> None:
        self._programs = programs
        self._machines = machines
        self._left_running: list[Program] = []
        runtime = programs.folder / "runtime"
        runtime.mkdir(mode=0o700)
        self._environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(runtime)}
        (programs.folder / ".venv").symlink_to(sys.prefix)

    def run_block(self, block: Block) -> None:
        lines = [line for line in block.text.splitlines() if not line.startswith("make ")]
        program = self._start("\n".join(lines), self._machine(block.title))
        if "terminal" in block.title and lines[0].startswith(("ps-server", "ps-worker")):
            self._left_running.append(program)
            if lines[0].startswith("ps-server"):
                program.wait_for("listening")
        else:
            assert program.wait(LIMIT) == 0, program.output

    def finish(self) -> None:
        for program in self._left_running:
            assert program.wait(LIMIT) == 0, program.output

    def _machine(self, title: str) -> tuple[str, ...]:
        if self._machines:
            return self._machines["machine 2" in title]
        if "machine" in title:
            pytest.skip(missing())
        return ()

    def _start(self, text: str, prefix: tuple[str, ...]) -> Program:
        first, *rest = (*prefix, "bash", "-euo", "pipefail", "-c", text)
        return self._programs.start(str(shutil.which(first)), *rest, **self._environment)


@pytest.mark.parametrize(("page", "section"), SECTIONS)
def test_commands_of_a_section_succeed(
    page: Path, section: str, programs: Programs, machines: list[tuple[str, ...]]
) -> None:
    for block in blocks(page):
        if block.language in ("python", "toml") and block.title:
            programs.script(block.text, block.title)
    runner = SectionRunner(programs, machines)
    for block in blocks(page):
        if block.section == section and block.language == "sh":
            runner.run_block(block)
    runner.finish()


@pytest.mark.parametrize("page", COMPLETE, ids=lambda page: page.stem)
def test_every_block_is_a_command_or_a_file(page: Path) -> None:
    """The test above therefore runs every command."""
    suffixes = {"python": ".py", "toml": ".toml"}

    assert {"sh", "python"} <= {block.language for block in blocks(page)} <= {"sh", *suffixes}
    assert all(
        block.language == "sh" or block.title.endswith(suffixes[block.language])
        for block in blocks(page)
    )
