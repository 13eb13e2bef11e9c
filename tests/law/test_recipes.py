"""The recipes of CONTRIBUTING.md name existing files, and the source follows each step.

Each failure begins with the name of the recipe to follow.
"""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import psworker
from pscommon.core import errors
from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from pscommon.optim import KINDS
from pscommon.settings import options
from pscommon.settings.option_types import POLICIES
from psserver.core.job.policy import policy
from psserver.process.config import ServerConfig
from psserver.process.metrics import ServerMetrics, standby_metrics
from psworker.data.sources import SOURCE_KINDS
from psworker.optim.step_strategies import STEP_STRATEGIES
from psworker.session.metrics import WorkerMetrics
from tests.support.sources import ROOT

SERVED_TOGETHER = {"shard": ("shard", "shards")}
OF_THE_PROCESS = {"log_level", "log_format", "threads", "malloc", "metrics_bind", "optimizers"}


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def recipes() -> dict[str, str]:
    """Return the text of each recipe by its title."""
    _, *parts = re.split(r"^### ", text("CONTRIBUTING.md"), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def files(recipe: str) -> list[str]:
    """Return the paths in the first column of its table; a bare name is in the folder before it."""
    found: list[str] = []
    for row in re.findall(r"^\| (.*?) \|", recipe, re.MULTILINE):
        for name in re.findall(r"`([\w./-]+)`", row):
            beside = str(Path(found[-1]).parent / name) if found and "/" not in name else name
            found.append(name if (ROOT / name).exists() else beside)
    return found


def cells(page: str) -> str:
    """Return the first cells of all tables of a page."""
    return "\n".join(re.findall(r"^\| (.*?) \|", text(page), re.MULTILINE))


@pytest.mark.parametrize("title", recipes())
def test_every_file_of_a_recipe_exists(title: str) -> None:
    named = files(recipes()[title])

    assert len(named) >= 3
    assert not [path for path in named if not (ROOT / path).exists()]


def test_add_an_optimizer() -> None:
    built_in = {name for name, kind in KINDS.items() if not kind.source}
    documented = set(re.findall(r"`(\w+)`", cells("docs/optimizers.md")))
    tested = text("tests/unit/psserver/test_store_torch.py")

    assert not built_in - documented, "Add an optimizer: docs/optimizers.md"
    assert not [name for name in built_in if f'"{name}"' not in tested], (
        "Add an optimizer: tests/unit/psserver/test_store_torch.py"
    )


def test_add_a_metric() -> None:
    registry = CollectorRegistry()
    ServerMetrics(registry, shard=0)
    WorkerMetrics(registry)
    families = [*registry.collect(), *standby_metrics(0, int).collect()]
    ends = {"counter": "_total", "info": "_info"}
    exported = {family.name + ends.get(family.type, "") for family in families}
    documented = set(re.findall(r"`(ps_\w+)`", text("docs/operations/monitoring.md")))

    assert documented == {name for name in exported if name.startswith("ps_")}, "Add a metric"


def test_add_a_flag() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    documented = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = {flag for table in options.TABLES.values() for option in table for flag in option.opts}
    fields = set(ServerConfig.__dataclass_fields__)
    settings = {option.key for option in options.TABLES["server"]} - OF_THE_PROCESS
    unread = {key for key in settings if not fields >= {*SERVED_TOGETHER.get(key, (key,))}}

    assert not unread, "Add a flag: psserver/process/config.py"
    assert not {flag for flag in named if not re.search(rf"{flag}(?![\w-])", documented)}, (
        "Add a flag: a page in docs/"
    )


def test_add_an_rpc() -> None:
    protos = "".join(path.read_text() for path in (ROOT / "proto/psproto/v1").glob("*.proto"))
    servicers = "".join(
        text(path) for path in files(recipes()["Add an RPC"]) if path.endswith("servicer.py")
    )
    methods = re.findall(r"^\s*rpc (\w+)\(", protos, re.MULTILINE)

    assert len(methods) > 20
    assert not [name for name in methods if not re.search(rf"def {name}\(|{name}=", servicers)], (
        "Add an RPC: a servicer in psserver"
    )


def is_policy(name: str) -> bool:
    try:
        return policy(name, 1 if name == "ssp" else None).name == name
    except ValueError:
        return False


def test_add_a_policy() -> None:
    for name in POLICIES:
        assert is_policy(name), "Add a policy: psserver/core/job/policy.py"
        for page in ("docs/concepts.md", "README.md"):
            assert re.search(rf"`{name}[ `]", cells(page)), f"Add a policy: {page}"
    known = text("psserver/core/job/policy.py").partition("def policy(")[2]
    names = set(re.findall(r'"(\w+)"', known.partition('raise ValueError(f"policy {name!r}')[0]))

    assert names == set(POLICIES), "Add a policy: common/pscommon/settings/option_types.py"


def test_add_a_data_source() -> None:
    makers = {
        match
        for path in (ROOT / "psworker/data").glob("*.py")
        for match in re.findall(r"^def (make_\w+_source)\(", path.read_text(), re.MULTILINE)
    }
    registered = {kind.make.__name__ for kind in SOURCE_KINDS}

    assert makers == registered, "Add a data source: psworker/data/sources.py"


def test_add_a_step_strategy() -> None:
    choices = text("tests/integration/test_push_path.py").partition("CHOICES:")[2]
    names = re.findall(r'^    "(\w+)": ', choices.partition("\n}")[0], re.MULTILINE)

    assert names == list(STEP_STRATEGIES), (
        "Add a step strategy: tests/integration/test_push_path.py"
    )


def test_add_an_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \|", text("docs/operations/troubleshooting.md"), re.MULTILINE)
    classes = {row.error for row in errors.REASONS.values()}
    public = {error for error in classes if error.__name__ in psworker.__all__}

    assert set(EXPLANATIONS) == set(ExitCode), "Add an exit code: EXPLANATIONS"
    assert {int(code) for code in rows} == {code for code in ExitCode if code < 128}, (
        "Add an exit code: docs/operations/troubleshooting.md"
    )
    assert {error.exit_code for error in classes} <= set(ExitCode), "Add an exit code: ExitCode"
    assert {error.exit_code for error in public} == {error.exit_code for error in classes}, (
        "Add an exit code: psworker/__init__.py"
    )
