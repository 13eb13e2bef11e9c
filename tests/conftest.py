"""How tests share a machine: `pytest -n 2 --dist loadgroup` (make test) keeps two cores busy without crowding them."""

import os

import pytest

# one thread per process: threads that wait for a core by spinning slow all of them
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start programs take turns, in one of the processes; the others go where there is room."""
    for item in items:
        fixtures: tuple[str, ...] = getattr(item, "fixturenames", ())
        if "programs" in fixtures or "benchmarks" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("programs"))
