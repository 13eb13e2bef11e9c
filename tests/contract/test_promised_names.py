"""Names that never change (promised/names.txt, docs/formats.md)."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pscommon.core.entry_encoding import encoded
from pscommon.core.errors import REASONS
from pscommon.core.exit_codes import ExitCode
from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Cut,
    Evict,
    Measure,
    PushKey,
    Reject,
    Reshard,
    SetBuffers,
)
from pscommon.wire.metrics_port import show_expiry
from psserver.core.commands.recorded import DECODERS, RecordedCommand
from psserver.core.commands.recorder import replay
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.settings import JobRules
from psserver.core.workers.health import WorkerHealth
from psserver.core.workers.members import WorkerState
from psserver.durability.coordinator_log import CoordinatorRecordKind
from psserver.durability.record_sink import RecordSource
from psserver.durability.shard_log import ShardRecordKind
from psserver.durability.state_records import StateRecordKind
from psserver.process.metrics import standby_metrics
from psworker.core import trace_events, why
from psworker.session import metrics as worker_metrics
from tests.contract.promised import found
from tests.contract.promised.journal import (
    COMMANDS,
    LOG_ID,
    RULES,
    SEVERAL_OPTIMIZERS_COMMANDS,
)
from tests.contract.promised.running_job import JobNames, names_of_a_running_job
from tests.support.simulated_trace import Delay, SimulatedJob

TABLE = Path(__file__).with_name("promised") / "names.txt"
JOURNALS = COMMANDS, SEVERAL_OPTIMIZERS_COMMANDS

REMOVED = (
    "These names are promised: processes, data directories, scripts and dashboards of users rely "
    "on them. Keep each of them (a Python name may change, a name in a format may not):"
)
ADDED = f"These names are new. Add them to {TABLE.name}, for ever, or do without them:"


def promised() -> Mapping[str, set[str]]:
    """Return the lines of the table by section."""
    sections: dict[str, set[str]] = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("["):
            lines = sections.setdefault(line.strip("[]"), set())
        elif line.strip() and not line.startswith("#"):
            lines.add(line)
    return sections


def check(section: str, names: set[str]) -> None:
    """Raise AssertionError with a remedy for each difference."""
    known = promised()[section]
    problems = [
        f"{text}\n  " + "\n  ".join(sorted(lines))
        for text, lines in ((REMOVED, known - names), (ADDED, names - known))
        if lines
    ]
    assert not problems, f"[{section}]\n" + "\n".join(problems)


# ---- names that the code lists -------------------------------------------------------------------


def commands() -> set[str]:
    return {" ".join([name, *_arguments(name)]) for name in DECODERS}


def _arguments(name: str) -> list[str]:
    samples = [set(command) for command in COMMANDS if command["do"] == name]
    return sorted(set[str]().union(*samples) - {"do"})


def entries() -> set[str]:
    """Return the text of each kind of entry that the log's digest covers."""
    pushes = (Contribution(PushKey(1, 2), 3, 4, 0.5),)
    samples = (
        Begin(1, 2),
        Apply(1, 2, pushes),
        Measure(1, pushes),
        Reject(1, PushKey(2, 3), "STALE", "é"),
        Evict(1, 2, "it left"),
        Cut(1, 2),
        Reshard(1, 2, 3),
        SetBuffers(1, PushKey(1, 2)),
    )
    return {encoded(entry) for entry in samples}


def record_kinds() -> set[str]:
    kinds = {
        "log-job": CoordinatorRecordKind,
        "log-shard": ShardRecordKind,
        "standby": StateRecordKind,
        "source": RecordSource,
    }
    return {f"{place} {kind.value} {kind.name}" for place, of in kinds.items() for kind in of}


def reasons() -> set[str]:
    return {
        f"{reason}: {row.error.__name__}, exit code {row.error.exit_code}, {row.status}"
        f"{', may succeed later' if row.retryable else ''}"
        for reason, row in REASONS.items()
    }


def exit_codes() -> set[str]:
    return {f"{code.value} {code.name}" for code in ExitCode}


def trace_file() -> set[str]:
    """Return the keys of a trace, and the names of its spans in each category."""
    written = trace_events.document(SimulatedJob(delay=Delay("log", 1)).trace())
    spans = {f"{e['cat']} {e['name']}" for e in written["traceEvents"] if e["ph"] == "X"}
    return found.key_paths(written, {}) | spans


def explanation() -> set[str]:
    explained = why.explain(SimulatedJob(delay=Delay("log", 1)).trace())
    return found.key_paths(explained.document(), {"phases": "PHASE"})


LISTED: Mapping[str, Callable[[], set[str]]] = {
    "proto": found.proto,
    "commands": commands,
    "log entries": entries,
    "record kinds": record_kinds,
    "reasons": reasons,
    "exit codes": exit_codes,
    "trace file": trace_file,
    "why": explanation,
    "worker states": lambda: {state.value for state in WorkerState},
    "worker health": lambda: {health.value for health in WorkerHealth},
}


@pytest.mark.parametrize("section", LISTED)
def test_names_in_the_code_are_the_promised_names(section: str) -> None:
    check(section, LISTED[section]())


# ---- commands of logs on disk --------------------------------------------------------------------


def replayed_states(commands: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the coordinator's state after each command of a journal."""
    coordinator = CoordinatorMachine(2, JobRules.from_json(RULES), log_id=LOG_ID)
    failures: list[str] = []
    for number, raw in enumerate(commands):
        command = RecordedCommand.from_json(json.loads(json.dumps({**raw, "now": number})))
        replay(
            coordinator, [command], lambda failed, error: failures.append(f"{failed}: {error!r}")
        )
        assert not failures, f"{failures}: a log on disk may hold this command"
        yield json.loads(json.dumps(coordinator.complete_state()))


@pytest.mark.parametrize("commands", JOURNALS, ids=["one optimizer", "several optimizers"])
def test_commands_of_recorded_logs_are_decoded_with_all_arguments(
    commands: Sequence[dict[str, Any]],
) -> None:
    """Other tests check what commands do."""
    assert len(list(replayed_states(commands))) == len(commands)


@pytest.mark.parametrize("raw", COMMANDS, ids=[str(raw["do"]) for raw in COMMANDS])
def test_decoded_commands_encode_to_the_same_bytes(raw: dict[str, Any]) -> None:
    written = {**raw, "now": 1.5}
    assert json.loads(json.dumps(RecordedCommand.from_json(written).as_json())) == written


# ---- what a running job shows --------------------------------------------------------------------


@pytest.fixture(scope="module")
def running_job(tmp_path_factory: pytest.TempPathFactory) -> JobNames:
    folder = tmp_path_factory.mktemp("contract")
    return names_of_a_running_job(folder / "data", folder / "lock")


def test_coordinator_state_has_the_promised_keys(running_job: JobNames) -> None:
    states = (
        found.key_paths(state, found.STATE_MAPS)
        for commands in JOURNALS
        for state in replayed_states(commands)
    )
    check("coordinator state", running_job.job_segment.union(*states))


def test_shard_segments_begin_with_the_promised_keys(running_job: JobNames) -> None:
    check("shard state", running_job.shard_segment)


def test_status_has_the_promised_keys(running_job: JobNames) -> None:
    check("status", running_job.status)
    check("settings in the status", running_job.settings)


def test_data_directory_has_the_promised_files(running_job: JobNames) -> None:
    check("data directory", running_job.files)


def test_metrics_have_the_promised_names_and_labels(running_job: JobNames) -> None:
    registry = worker_metrics.CollectorRegistry()
    worker_metrics.WorkerMetrics(registry).reported("loss", 0.5)
    show_expiry(registry, Mock(material=Mock(expires=0.0)))
    workers, standby = found.metrics(registry), found.metrics(standby_metrics(0, int))
    check("metrics", running_job.metrics | workers | standby)


# ---- the check itself ----------------------------------------------------------------------------


def test_missing_and_new_names_are_reported_with_a_remedy() -> None:
    known = promised()["exit codes"]
    with pytest.raises(AssertionError, match=r"Keep each of them[^\0]*10 TAKEN"):
        check("exit codes", known - {"10 TAKEN"})
    with pytest.raises(AssertionError, match=r"Add them to names.txt[^\0]*99 LATE"):
        check("exit codes", known | {"99 LATE"})
