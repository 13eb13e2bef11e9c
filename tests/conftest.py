"""How tests share a machine: `pytest -n 2 --dist loadgroup` (make test) keeps two cores busy without crowding them."""

import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# one thread per process: threads that wait for a core by spinning slow all of them
os.environ.setdefault("OMP_NUM_THREADS", "1")
# on a GPU recurrent layers only give the same bytes again with this
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")

# no example fails because the machine stood still for a moment
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Jobs of the tests announce themselves where commands outside of this test process do not look."""
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="ps-tests-")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start programs take turns, in one of the processes; the others go where there is room."""
    for item in items:
        fixtures: tuple[str, ...] = getattr(item, "fixturenames", ())
        if "programs" in fixtures or "benchmarks" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("programs"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a process of pytest-xdist: it has to know the groups. It may forget them without a word."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid.rpartition("]")[2].rpartition("::")[2]:
            raise pytest.UsageError(f"{item.nodeid} is in no group: these pytest and pytest-xdist do not go together")
