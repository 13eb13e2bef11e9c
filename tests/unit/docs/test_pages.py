"""The files, flags, variables and Python names in the documentation exist."""

import os
import re
from pathlib import Path

import pytest

import psworker
from pscommon.settings import options
from pscommon.settings.command import REMOVED
from pscommon.settings.environment import OTHERS
from psworker.ctl.cli import ps_ctl
from tests.support.documentation_pages import ROOT, blocks, pages, prose
from tests.support.prometheus_queries import ALERTS

LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)")
OTHER_PROGRAMS = frozenset(
    {
        # pip, make, docker, python -m benchmarks, pytest
        "--build",
        "--no-python",  # torchrun
        "--nproc-per-node",
        "--het-group",  # srun
        "--volumes",
        "--scale",
        "--logdir",
        "--build-arg",
        "--ipc",
        "--rm",
        "--only",
        # docker compose, kubectl, srun, sbatch, scontrol, ray, spark-submit
        "--address",
        "--archives",
        "--cpus-per-task",
        "--detach",
        "--display-name",  # gcloud
        "--follow",
        "--from-file",
        "--gpus-per-task",
        "--head",
        "--no-build",
        "--no-kill",
        "--nodes",
        "--ntasks-per-node",
        "--patch",
        "--profile",
        "--region",
        "--signal",
        "--target",
        "--rounds",
        "--pushes",
        "--minutes",
        # the example scripts
        "--epochs",
        "--batch-size",
        "--lr",
        "--steps",
        "--bytes",
        "--seed",
    }
)
SETTING = re.compile(r"\bPS_[A-Z_]+\b")
SET_FOR_SCRIPTS = frozenset(
    {"PS_WORKER_RANK", "PS_WORKER_COUNT", "PS_SERVERS", "PS_JOB", "PS_DEVICE"}
)


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def flags() -> set[str]:
    found = {flag for table in options.TABLES.values() for option in table for flag in option.opts}
    commands = [ps_ctl]
    while commands:
        command = commands.pop()
        found |= {flag for parameter in command.params for flag in parameter.opts}
        commands += getattr(command, "commands", {}).values()
    return found | {"--config", "--help", "--version"}


def removed(page: Path) -> list[str]:
    """Return the settings of earlier releases that a page may name: only one about history does."""
    return [*REMOVED] if page.name == "CHANGELOG.md" or page.parent.name == "adr" else []


def removed_flags(page: Path) -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in removed(page)}


def removed_variables(page: Path) -> set[str]:
    return {f"PS_{name.upper()}" for name in removed(page)}


@pytest.mark.parametrize("page", pages(), ids=names)
def test_links_lead_to_files(page: Path) -> None:
    missing = [
        target
        for target in LINK.findall(prose(page))
        if not Path(os.path.normpath(page.parent / target)).exists()
    ]

    assert not missing


@pytest.mark.parametrize("page", pages(), ids=names)
def test_flags_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+\b", page.read_text(encoding="utf-8")))

    assert named <= flags() | OTHER_PROGRAMS | removed_flags(page)


@pytest.mark.parametrize("page", pages(), ids=names)
def test_variables_exist(page: Path) -> None:
    twins = {
        variable
        for table in options.TABLES.values()
        for option in table
        for variable in option.variables
    }
    named = set(SETTING.findall(page.read_text(encoding="utf-8")))

    known = twins | OTHERS | SET_FOR_SCRIPTS | removed_variables(page)
    assert {name for name in named if not name.endswith("_")} <= known


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: psworker\.(?:\w+\.)*(\w+)$", text, re.MULTILINE))

    assert listed == set(psworker.__all__)


def test_the_monitoring_page_has_every_alert() -> None:
    text = (ROOT / "docs/operations/monitoring.md").read_text(encoding="utf-8")

    assert set(re.findall(r"^\| `([A-Z]\w+)` \|", text, re.M)) == set(
        re.findall(r"- alert: (\w+)", ALERTS.read_text())
    )


def test_the_glossary_is_short_and_sorted() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([^|]+?) \|", text, re.M)[2:]

    assert len(terms) <= 40
    assert terms == sorted(terms, key=str.lower)


def test_the_tests_named_in_faults_exist() -> None:
    """A name without a folder is in the folder of the name before it."""
    missing = []
    for row in (
        line
        for line in (ROOT / "FAULTS.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ):
        folder = ROOT / "tests"
        for name in re.findall(r"`(tests/[\w/.*]+|test_[\w*]+\.py)`", row):
            path = ROOT / name if name.startswith("tests/") else folder / name
            folder = path.parent
            if not list(folder.glob(path.name)):
                missing.append(name)

    assert not missing


def test_the_rows_of_faults_are_short() -> None:
    """At most 40 words, with the names of the tests."""
    rows = (ROOT / "FAULTS.md").read_text(encoding="utf-8").splitlines()

    assert not [
        row for row in rows if row.startswith("|") and len(row.replace("|", " ").split()) > 40
    ]


@pytest.mark.parametrize(
    ("page", "new", "changed", "claim"),
    [
        ("README.md", 5, 3, "five new lines, three changed"),
        ("docs/tutorial.md", 7, 4, "seven lines are new and four changed"),
    ],
)
def test_pages_count_the_lines_that_a_job_needs(
    page: str, new: int, changed: int, claim: str
) -> None:
    """Every line of the example that names psworker, the job or its loader is marked."""
    (script,) = (block.text for block in blocks(ROOT / page) if block.title == "train.py")
    lines = re.findall(r"^.*\b(?:psworker|job|loader\.skipped)\b.*$", script, re.M)

    assert claim in (ROOT / page).read_text(encoding="utf-8")
    assert sum("  # new" in line for line in lines) == new
    assert sum("  # changed" in line for line in lines) == changed
    assert len(lines) == new + changed


def test_pages_have_their_maximal_length() -> None:
    limits = {"README.md": 150, "ARCHITECTURE.md": 160}
    limits |= {str(page.relative_to(ROOT)): 30 for page in (ROOT / "docs/adr").glob("0*.md")}
    lengths = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in limits}

    assert len(limits) > 20
    assert not {name: length for name, length in lengths.items() if length > limits[name]}


def test_architecture_lists_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("## Packages")[2].partition("Rules, checked")[0]
    listed = set()
    for name in re.findall(r"`([\w/{},]+)`", table):
        start, _, ends = name.partition("{")
        listed |= {start + end for end in ends.rstrip("}").split(",")}
    folders = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("ps*/**/__init__.py")}
    shared = {path.parent.name for path in (ROOT / "common/pscommon").glob("*/__init__.py")}
    packages = {folder for folder in folders if "/" in folder and folder != "psserver/core"}

    assert listed - {"psproto"} == packages | {f"pscommon/{name}" for name in shared}
