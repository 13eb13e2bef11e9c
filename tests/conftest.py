"""Tiers of the test suite, and how its processes share the machine: tests/README.md."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pscommon.security import credentials
from pscommon.telemetry.logs import forget_limits
from psworker.connect import Connects
from tests.support.process_slots import ProcessSlots, slots_of

TESTS = Path(__file__).parent
FULL_TIER = {"faults", "process", "tools"}
"""Folders that only `make test-all` runs."""
PARSING_TESTS = "law"
"""The folder of the tests that parse all sources, in one process of pytest-xdist."""
SMOKE_TESTS = "smoke"
"""The folder of the process tests that `make test` runs."""

# one thread per process: threads that wait for a core by spinning slow all of them
os.environ.setdefault("OMP_NUM_THREADS", "1")
# needed for reproducible recurrent layers on a GPU
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")

# a shell can start its background jobs such that they ignore Ctrl-C, which many tests send
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# no example fails because the machine was paused
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def first_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test's connects begin at training "0", as those of a process do."""
    monkeypatch.setattr(sys.modules["psworker.connect"], "connects", Connects())


@pytest.fixture(autouse=True)
def own_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after a test which credentials its commands and clients have set."""
    of_test = type("OfTest", (credentials._Process,), {})
    monkeypatch.setattr(credentials, "_Process", of_test)


@pytest.fixture(autouse=True)
def unlimited_logs() -> None:
    """Let the log lines of one test leave out none of the next one."""
    forget_limits()


slots_key = pytest.StashKey[ProcessSlots]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the suite its own runtime directory, so that other commands do not find its jobs."""
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="ps-tests-")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True))
    # the processes of pytest-xdist inherit the environment of the first one
    if not hasattr(config, "workerinput"):
        os.environ["TEST_SLOTS"] = str(Path(os.environ["XDG_RUNTIME_DIR"]) / "slots")
    slots = config.stash[slots_key] = ProcessSlots(Path(os.environ["TEST_SLOTS"]))
    config.add_cleanup(slots.close)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Begin each test with the same seed, which loaders use by default."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes a thousand times longer
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


def folder_of(item: pytest.Item) -> str:
    """Return the test's folder below tests/."""
    return item.path.relative_to(TESTS).parts[0]


def measures_time(item: pytest.Item) -> bool:
    return item.get_closest_marker("timing") is not None


def starts_processes(item: pytest.Item) -> bool:
    return folder_of(item) in {SMOKE_TESTS, *FULL_TIER} or "programs" in getattr(
        item, "fixturenames", ()
    )


def is_full(item: pytest.Item) -> bool:
    """Return whether only `make test-all` runs it. Tests without processes use the mark `full`."""
    return starts_processes(item) and folder_of(item) != SMOKE_TESTS


def shares_fixture(item: pytest.Item) -> bool:
    """Return whether it uses a module fixture; such tests run in one process."""
    found = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(definitions[-1].scope == "module" for definitions in found)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist and -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order timing tests first and one after the other; other tests run beside them."""
    number = Counter[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        every = item.get_closest_marker("every")
        if is_full(item) or (every and number[name] % every.args[0]):
            item.add_marker(pytest.mark.full)
        number[name] += 1
        if measures_time(item):
            item.add_marker(pytest.mark.xdist_group("timing"))
        elif folder_of(item) == PARSING_TESTS:
            item.add_marker(pytest.mark.xdist_group(PARSING_TESTS))
        elif shares_fixture(item):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(TESTS))))
    items.sort(key=lambda item: 0 if measures_time(item) else 1 + starts_processes(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout begins to count
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Acquire a slot for a process test, all slots for a test that measures time."""
    if not (measures_time(item) or starts_processes(item)):
        return (yield)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    with item.config.stash[slots_key].hold(slots_of(worker, measures_time(item))):
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage rarely, and never visit the modules and tests, a million objects.

    Check that pytest-xdist preserved the groups; it could drop them silently.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 10, 50)
    if not getattr(session.config.option, "loadgroup", False):
        return
    for item in session.items:
        if (
            item.get_closest_marker("xdist_group")
            and "@" not in item.nodeid.rpartition("]")[2].rpartition("::")[2]
        ):
            raise pytest.UsageError(
                f"{item.nodeid} is in no group: these pytest and pytest-xdist do not go together"
            )
