"""The curves of a job as TensorBoard's own reader sees them."""

from pathlib import Path

import pytest

Curve = list[tuple[int, float]]


def curves(folder: Path) -> dict[str, Curve]:
    """Return the points (step, value) of each curve of a run.

    Skips the test where the package tensorboard is not installed.
    """
    module = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(module, reason="needs the package tensorboard")
    found = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(point.step, point.value) for point in points]
        for tag in found.Tags()["scalars"]
        if (points := found.Scalars(tag))  # a cut can leave none
    }
