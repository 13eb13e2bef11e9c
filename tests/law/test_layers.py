"""Imports follow the rules for layers in ARCHITECTURE.md."""

import sys

import pytest

from tests.support.sources import Source, packages, parse

# modules for pure state machines: values and arithmetic, without clocks, random numbers, waits and
# I/O
PURE = {
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "string",
    "types",
    "typing",
}
# numpy's seeded generator defines the order of a shuffle
PURE_EXTRAS = {
    "pscommon.core.data_loop": {"numpy"},
    "psworker.core.protocols": {"contextlib"},  # for a type
}
IMPURE_CALLS = {"open", "print", "input", "id"}

# Modules in which each library may be imported, with their submodules. Other libraries may not be
# imported.
WIRE = {"pscommon.tracing", "pscommon.wire", "psserver", "psworker"}
NUMBERS = {  # the only modules with tensors; the client of psworker needs no framework
    "pscommon.optim",
    "pscommon.optim.specs",
    "pscommon.parameters",
    "pscommon.snapshot",
    "psserver.app",
    "psserver.server",
    "psserver.durability.snapshots",
    "psserver.parameters.staging",
    "psserver.shard.worker_traffic",
    "psserver.parameters.store",
    "psworker.optim",
    "psworker.model",
    "psworker.cli",
    "psworker.connect",
    "psworker.ctl.checks",
    "psworker.data",
    "psworker.examples",
    "psworker.group",
    "psworker.job",
    "psworker.client.local_client",
    "psworker.integrations",
    "psworker.simulation",
    "psworker.steps",
    "psworker.training",
    "psworker.training_nodes",
}
COMMANDS = {
    "pscommon.settings.command",
    "pscommon.settings.options",
    "pscommon.settings.server_options",
    "pscommon.settings.values",
    "psserver.cli",
    "psworker.cli",
}
HOMES = {
    "grpc": WIRE,
    "grpc_health": {"psserver", "psworker"},
    "grpc_reflection": {"psserver"},
    "grpc_status": {"pscommon.wire"},
    "google": {"pscommon.tracing", "pscommon.wire"},
    "psproto": WIRE,
    "numpy": {"pscommon", "psserver", "psworker"},
    "torch": NUMBERS,
    "safetensors": {"pscommon.snapshot"},
    "prometheus_client": {
        "pscommon.telemetry.http",
        "pscommon.wire.metrics_port",
        "psserver.process.metrics",
        "psworker.session.metrics",
        "psworker.simulation",
    },
    "cryptography": {"pscommon.security"},
    "tensorboardX": {"pscommon.system.event_files"},
    "opentelemetry": {"psserver.monitoring.step_export"},
    "pyarrow": {"psworker.data.parquet"},
    "pyspark": {"psworker.spark"},
    "click": {*COMMANDS, "psworker.run", "psworker.ctl"},
    "rich": {"psworker.run", "psworker.ctl"},
    "structlog": {"pscommon.telemetry.logs"},
    "sklearn": {"psworker.examples"},
    "torchvision": {"psworker.examples.resnet"},
    "transformers": {"psworker.integrations.transformers", "psworker.examples.gpt2"},
    "accelerate": {"psworker.integrations.accelerate"},
    "ray": {"psworker.run.ray_engine", "psworker.run.ray_node"},
    "lightning": {"psworker.integrations.lightning"},
}
OURS = ("pscommon", "psserver", "psworker")


def is_in(module: str, homes: set[str] | tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(home + ".") for home in homes)


def is_core(module: str) -> bool:
    return ".core." in module + "."


def violation(source: Source, imported: str) -> str:
    """Return the rule of the table that an import violates; empty if none."""
    module, top = source.module, imported.partition(".")[0]
    if is_core(module):
        return core_violation(module, imported)
    if top in sys.stdlib_module_names:
        return ""
    if top in OURS:
        return own_violation(module, imported)
    if top not in HOMES:
        return "is no dependency of ours"
    return "" if is_in(module, HOMES[top]) else f"belongs in {sorted(HOMES[top])}"


def core_violation(module: str, imported: str) -> str:
    own_core = module[: (module + ".").index(".core.") + len(".core")]
    allowed = PURE | PURE_EXTRAS.get(module, set())
    tracing = ("pscommon.tracing.spans", "pscommon.tracing.clock_offset")
    values = ("pscommon.core", *tracing, own_core)
    if imported.partition(".")[0] in allowed or is_in(imported, values):
        return ""
    # `from pscommon.core import x` names the package above it on the way
    return "" if imported == "pscommon" else "is not for a pure core"


def own_violation(module: str, imported: str) -> str:
    layer, other = module.partition(".")[0], imported.partition(".")[0]
    if layer == "pscommon":
        if other != "pscommon":
            return "is a layer above"
        if is_in(imported, ("pscommon.wire",)) and not is_in(module, ("pscommon.wire",)):
            return "is a layer above"
        return ""
    if layer == "psserver" and other == "psworker":
        return "is the other side"
    if layer == "psworker" and other == "psserver" and module != "psworker.simulation":
        return "is the other side; only psworker.simulation may"
    return ""


def test_imports_keep_to_the_table() -> None:
    """Imports inside functions and for type checking count as well."""
    found = [
        f"{source.path}:{line}: {imported} {reason}"
        for source in packages()
        for imported, line in sorted(set(source.imports()), key=lambda pair: pair[1])
        if (reason := violation(source, imported))
    ]

    assert not found, "\n".join(found)


def test_cores_have_no_side_effects() -> None:
    """No file, terminal or memory address in a machine that must be deterministic."""
    found = [
        f"{source.path}:{line}: {name}()"
        for source in packages()
        if is_core(source.module)
        for name, line in source.calls()
        if name in IMPURE_CALLS
    ]

    assert not found, "\n".join(found)


def test_the_listed_cores_exist() -> None:
    """Otherwise the law would pass after a core is moved."""
    cores = {source.module.partition(".core")[0] for source in packages() if is_core(source.module)}

    assert cores == set(OURS)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("psserver/core/shard/state_machine.py", "import time"),
        ("psserver/core/shard/state_machine.py", "def f():\n    from random import random"),
        ("psserver/core/shard/state_machine.py", "import numpy"),
        (
            "psserver/core/shard/state_machine.py",
            "from psserver.parameters.store import ParameterStore",
        ),
        ("psserver/core/shard/state_machine.py", "from ...parameters import store"),
        ("psworker/core/push_sequence.py", "import psserver.core.shard.state_machine"),
        ("common/pscommon/core/partition.py", "import torch"),
        ("common/pscommon/core/partition.py", "from pscommon import logs"),
        ("common/pscommon/telemetry/logs.py", "from pscommon.wire import endpoint"),
        ("common/pscommon/telemetry/logs.py", "import psserver"),
        ("common/pscommon/telemetry/logs.py", "import grpc"),
        ("psserver/exchange/handlers.py", "from psworker import client"),
        ("psserver/exchange/handlers.py", "import torch"),
        ("psserver/shard/engine.py", "import prometheus_client"),
        ("psworker/client/client.py", "import torch.nn"),
        ("psworker/job.py", "from psserver.parameters.store import ParameterStore"),
        ("psworker/job.py", "import tests.law"),
        ("psworker/job.py", "import requests"),
    ],
)
def test_the_law_finds(path: str, text: str) -> None:
    """One occurrence in each."""
    source = parse(text, path)

    assert any(violation(source, imported) for imported, _ in source.imports())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "psserver/core/shard/state_machine.py",
            "from pscommon.core import log\nfrom psserver.core.job.policy import Policy\nimport "
            "math",
        ),
        (
            "psserver/parameters/store.py",
            "import torch\nimport threading\nfrom pscommon.optim.specs import validate",
        ),
        ("psworker/simulation.py", "from psserver.parameters.store import ParameterStore"),
        (
            "common/pscommon/wire/messages.py",
            "from psproto.v1 import model_pb2\nfrom pscommon.core.model_spec import ModelSpec",
        ),
    ],
)
def test_the_law_allows(path: str, text: str) -> None:
    """Imports that the table permits."""
    source = parse(text, path)

    assert not [imported for imported, _ in source.imports() if violation(source, imported)]
