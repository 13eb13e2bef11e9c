"""The recipes of CONTRIBUTING.md name existing files, and the source follows each step.

Each failure begins with the name of the recipe to follow.
"""

import inspect
import re
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

import psworker
from pscommon import optim
from pscommon.core import errors
from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from pscommon.core.limits import POLICIES
from pscommon.optim import KINDS
from pscommon.settings import options
from pscommon.tracing.recorder import SpanRecorder
from pscommon.tracing.spans import SHARD_PHASES
from pscommon.wire import requests
from pscommon.wire.metrics_port import show_expiry
from pscommon.wire.push import parts_from_proto
from pscommon.wire.requests import REQUESTS
from psproto.v1 import parameter_server_pb2 as ps
from psserver.coordinator.status import PER_SERVER_SETTINGS
from psserver.core.commands import data_commands, job_commands, shard_commands, worker_commands
from psserver.core.commands.command import Command
from psserver.core.commands.recorded import DECODERS
from psserver.core.job.policy import policy
from psserver.process.config import ServerConfig
from psserver.process.metrics import ServerMetrics, standby_metrics
from psworker import Job
from psworker.data.loader import SOURCE_KINDS
from psworker.optim.served_model import STEP_STRATEGIES
from psworker.session.metrics import WorkerMetrics
from tests.contract.promised.journal import COMMANDS
from tests.support.optimizer_cases import CASES
from tests.support.policies import POLICIES as POLICY_CASES
from tests.support.setting_samples import SAMPLES
from tests.support.settings_coverage import settings_with_test
from tests.support.sources import ROOT, packages

SECURITY_KEYS = ("tls_ca", "tls_cert", "tls_key", "token_file", "insecure")
FIELDS_OF = {"shard": ("shard", "shards"), **dict.fromkeys(SECURITY_KEYS, ("security",))}
"""Fields of ServerConfig that hold a setting under another name."""

OF_THE_PROCESS = {"log_level", "log_format", "threads", "metrics_bind", "optimizers"}
OF_THE_FIRST_RELEASE = {"sgd", "adam", "adamw", "adagrad", "rmsprop"}
OPTIMIZER_ROW = re.compile(
    r"^\| (`\w+`(?:, `\w+`)*) \| `(?:torch\.optim|psworker)\.(.*)", re.MULTILINE
)
"""A row of docs/optimizers.md: names, and what servers keep."""

PROMISED = "tests/contract/promised/names.txt"


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def promised(section: str) -> set[str]:
    """Return the lines of a section of the promised names."""
    lines = text(PROMISED).partition(f"\n[{section}]\n")[2].partition("\n[")[0].splitlines()
    return {line for line in lines if line and not line.startswith("#")}


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


def test_every_recipe_has_a_test() -> None:
    tests = {title: f"test_{title.lower().replace(' ', '_')}" for title in recipes()}

    assert not [title for title, test in tests.items() if test not in globals()]


def test_add_an_optimizer() -> None:
    built_in = {name: kind for name, kind in KINDS.items() if not kind.source}
    unchanged = {
        f"{name}: {key}"
        for name, cases in CASES.items()
        if name in built_in
        for key in built_in[name].defaults
        if not any(key in group for group in (cases.default, *chain(*cases.variants)))
    }
    rows = OPTIMIZER_ROW.findall(text("docs/optimizers.md"))
    documented = {name: row for names, row in rows for name in re.findall(r"\w+", names)}
    undocumented = {
        f"{name}: {state.name}"
        for name, kind in built_in.items()
        for state in (*kind.states, *kind.scalars)
        if f"`{state.name}`" not in documented.get(name, "")
    }
    changes = text("CHANGELOG.md")
    unannounced = {
        kind.torch_class.__name__
        for name, kind in built_in.items()
        if name not in OF_THE_FIRST_RELEASE
        and not re.search(rf"\b{kind.torch_class.__name__}\b", changes)
    }

    assert not {*CASES, *documented} - {*built_in}, (
        "Add an optimizer: torch_kinds.py or a new module in common/pscommon/optim"
    )
    assert not {*built_in} - {*CASES}, "Add an optimizer: tests/support/optimizer_cases.py"
    assert not unchanged, "Add an optimizer: tests/support/optimizer_cases.py"
    assert not {*built_in} - {*documented}, "Add an optimizer: docs/optimizers.md"
    assert not undocumented, "Add an optimizer: docs/optimizers.md"
    assert not unannounced, "Add an optimizer: CHANGELOG.md"


def test_add_an_optimizer_with_a_class_of_our_own() -> None:
    modules = {
        name: path.stem
        for path in (ROOT / "common/pscommon/optim").glob("*.py")
        for name in re.findall(r"^class (\w+)\(ElementwiseOptimizer\)", path.read_text(), re.M)
    }
    reference = text("docs/reference/python.md")
    registered = {kind.torch_class.__name__ for kind in KINDS.values()}

    assert "Lion" in modules
    assert not {*modules} - {*optim.__all__}, "Add an optimizer: common/pscommon/optim/__init__.py"
    assert not {*modules} - registered, "Add an optimizer: add_formula in the module of the class"
    for name, module in modules.items():
        assert name in psworker.__all__, "Add an optimizer: psworker/__init__.py"
        assert hasattr(psworker, name), "Add an optimizer: psworker/__init__.py"
        assert f"::: psworker.{name}\n" in reference, "Add an optimizer: docs/reference/python.md"
        assert (ROOT / f"tests/unit/pscommon/test_{module}.py").exists(), (
            f"Add an optimizer: tests/unit/pscommon/test_{module}.py"
        )


def test_add_a_metric() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry, shard=0)
    metrics.show_shard(dict)
    metrics.show_goodput(lambda: {"samples": None})
    metrics.show_phases(SpanRecorder(measured=SHARD_PHASES))
    WorkerMetrics(registry)
    show_expiry(registry, Mock(material=Mock(expires=0.0)))
    families = [*registry.collect(), *standby_metrics(0, int).collect()]
    families = [family for family in families if family.name.startswith("ps_")]
    ends = {"counter": "_total", "info": "_info"}
    exported = {family.name + ends.get(family.type, "") for family in families}
    page = text("docs/operations/monitoring.md")
    documented = set(re.findall(r"`(ps_\w+)`", page))
    alerts = set(re.findall(r"- alert: (\w+)", text("deploy/alerts.yml")))
    names = {line.split()[1] for line in promised("metrics")}

    assert documented == exported, "Add a metric: docs/operations/monitoring.md"
    assert not {family.name for family in families} - names, f"Add a metric: {PROMISED}"
    assert not {name for name in alerts if f"`{name}`" not in page}, (
        "Add a metric: an alert in docs/operations/monitoring.md"
    )
    assert not {name for name in alerts if name not in text("tests/tools/alerts_test.yml")}, (
        "Add a metric: an alert in tests/tools/alerts_test.yml"
    )


def test_add_a_flag() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    documented = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = {flag for table in options.TABLES.values() for option in table for flag in option.opts}
    keys = {table: {each.key for each in found} for table, found in options.TABLES.items()}
    fields = set(ServerConfig.__dataclass_fields__)
    settings = keys["server"] - OF_THE_PROCESS
    unread = {key for key in settings if not fields >= {*FIELDS_OF.get(key, (key,))}}
    in_status = {
        key for key in keys["server"] if not {*FIELDS_OF.get(key, (key,))} <= {*PER_SERVER_SETTINGS}
    }

    assert not unread, "Add a flag: psserver/process/config.py"
    assert not {flag for flag in named if not re.search(rf"{flag}(?![\w-])", documented)}, (
        "Add a flag: a page in docs/"
    )
    assert not set().union(*keys.values()) - {*SAMPLES}, (
        "Add a flag: tests/support/setting_samples.py"
    )
    assert not in_status - promised("settings in the status"), f"Add a flag: {PROMISED}"
    for table, marked in keys.items():
        assert not marked - settings_with_test(table), (
            "Add a flag: a test with a mark of tests/support/settings_coverage.py"
        )


def test_add_an_rpc() -> None:
    protos = "".join(path.read_text() for path in (ROOT / "proto/psproto/v1").glob("*.proto"))
    bound = [path for path in files(recipes()["Add an RPC"]) if path.startswith("psserver/")]
    handlers = "".join(map(text, bound))
    callers = "".join(source.text for source in packages() if str(source.path) not in bound)
    constants = {row.name: name for name, row in vars(requests).items() if row in REQUESTS}
    stubs = "".join(path.read_text() for path in (ROOT / "common/psproto").rglob("*_grpc.py"))
    methods = re.findall(r"^\s*rpc (\w+)\(", protos, re.MULTILINE)
    names = {line.split(":")[0].rpartition(".")[2] for line in promised("proto")}

    assert len(methods) > 20
    assert not [name for name in methods if f"def {name}(" not in stubs], (
        "Add an RPC: common/psproto, by `make proto`"
    )
    assert not {*methods} - {*constants}, "Add an RPC: common/pscommon/wire/requests.py"
    for name, constant in constants.items():
        assert re.search(rf"\b{constant}: ", handlers), f"Add an RPC: a handler of {name}"
        assert re.search(rf"\b{constant}\b(?! = )", callers), f"Add an RPC: the call of {name}"
    assert not {*methods} - names, f"Add an RPC: {PROMISED}"


def test_add_an_encoding_of_pushes() -> None:
    for encoding in {*ps.Encoding.values()} - {ps.ENCODING_UNSPECIFIED}:
        message = ps.Part(target=ps.TARGET_MODEL, encoding=encoding, ranges=[0, 64])
        (part,) = parts_from_proto([message])
        assert part.encoding == encoding, "Add an encoding of pushes: pscommon/wire/push.py"


def test_add_a_command_to_the_coordinator() -> None:
    modules = (data_commands, job_commands, shard_commands, worker_commands)
    names = {
        command.wire_name
        for module in modules
        for command in vars(module).values()
        if isinstance(command, type) and issubclass(command, Command) and command is not Command
    }
    recorded = {str(command["do"]) for command in COMMANDS}
    recipe = "Add a command to the coordinator"

    assert names == {*DECODERS}, f"{recipe}: psserver/core/commands/recorded.py"
    assert names <= {line.split()[0] for line in promised("commands")}, f"{recipe}: {PROMISED}"
    assert names <= recorded, f"{recipe}: tests/contract/promised/journal.py"


def is_policy(name: str) -> bool:
    try:
        return policy(name, 1 if name == "ssp" else None).name == name
    except errors.InvalidRequestError:
        return False


def test_add_a_policy() -> None:
    for name in POLICIES:
        assert is_policy(name), "Add a policy: psserver/core/job/policy.py"
        for page in ("docs/concepts.md", "README.md"):
            assert re.search(rf"`{name}[ `]", cells(page)), f"Add a policy: {page}"

    assert {case["policy"] for case in POLICY_CASES.values()} == set(POLICIES), (
        "Add a policy: tests/support/policies.py"
    )
    for name in POLICIES:
        assert f'"{name}"' in text("tests/integration/test_policies.py"), (
            "Add a policy: tests/integration/test_policies.py"
        )


def test_add_a_data_source() -> None:
    sources = {
        match
        for path in (ROOT / "psworker/data").glob("*.py")
        for match in re.findall(
            r'^class (\w+):\n    """The data source of', path.read_text(), re.MULTILINE
        )
    }
    registered = {source.__name__ for _, source in SOURCE_KINDS}

    guide = text("docs/loader.md").lower()

    assert sources == registered, "Add a data source: psworker/data/loader.py"
    for source in sources:
        kind = re.split("(?<=[a-z])(?=[A-Z])", source)[0].lower()
        assert re.search(rf"\b{kind}", guide), f"Add a data source: docs/loader.md on {kind}"


def test_add_a_step_strategy() -> None:
    choices = text("tests/integration/test_push_path.py").partition("CHOICES:")[2]
    choices = choices.partition("\n}")[0]
    names = re.findall(r'^    "(\w+)": ', choices, re.MULTILINE)
    arguments = set(re.findall(r'[{ ]"(\w+)": \w+[,}]', choices))
    strategies = {
        name
        for path in (ROOT / "psworker/steps").glob("*.py")
        for name in re.findall(r"^class (\w+Step)\(", path.read_text(), re.MULTILINE)
    }
    registered = {strategy.__name__ for strategy in STEP_STRATEGIES.values()}
    guide = text("docs/scripts.md")

    assert names == list(STEP_STRATEGIES), (
        "Add a step strategy: tests/integration/test_push_path.py"
    )
    assert strategies <= registered, "Add a step strategy: psworker/optim/served_model.py"
    assert arguments <= {*inspect.signature(Job.optimizer).parameters}, (
        "Add a step strategy: psworker/job.py"
    )
    assert not [name for name in arguments if f"{name}=" not in guide], (
        "Add a step strategy: docs/scripts.md"
    )


def test_add_an_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \|", text("docs/operations/troubleshooting.md"), re.MULTILINE)
    classes = {row.error for row in errors.REASONS.values()}
    public = {error for error in classes if error.__name__ in psworker.__all__}
    public_names = {error.__name__ for error in public}
    reference = text("docs/reference/python.md")

    assert set(EXPLANATIONS) == set(ExitCode), "Add an exit code: EXPLANATIONS"
    assert {int(code) for code in rows} == {code for code in ExitCode if code < 128}, (
        "Add an exit code: docs/operations/troubleshooting.md"
    )
    assert {error.exit_code for error in classes} <= set(ExitCode), "Add an exit code: ExitCode"
    assert {error.exit_code for error in public} == {error.exit_code for error in classes}, (
        "Add an exit code: psworker/__init__.py"
    )
    assert not [name for name in public_names if f"::: psworker.{name}\n" not in reference], (
        "Add an exit code: docs/reference/python.md"
    )
    assert {f"{code.value} {code.name}" for code in ExitCode} <= promised("exit codes"), (
        f"Add an exit code: {PROMISED}"
    )
    assert {*errors.REASONS} <= {line.partition(":")[0] for line in promised("reasons")}, (
        f"Add an exit code: {PROMISED}"
    )
