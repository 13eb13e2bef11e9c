"""No optimizer needs torch's compiler; test_store_torch checks what they compute."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

STEPS = """
import sys
import psserver.app
from pscommon.core.model_spec import OptimizerSettings
from pscommon.optim import KINDS
from tests.support.stores import Shards, model, noise
for name in KINDS:
    for dtype in ("float32", "bfloat16"):
        settings = OptimizerSettings(name, ({}, {"lr": 0.5}))
        spec = model(((3, 5), dtype, 0), ((7,), dtype, 1), optimizer=settings)
        job = Shards(spec, 2)
        job.begin(noise(spec, seed=1))
        job.step(noise(spec, seed=2))
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
"""


@pytest.mark.full
def test_a_server_that_steps_has_not_loaded_the_compiler() -> None:
    """Loading takes a second, while workers wait for a restarted server."""
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout.split() == ["True", "False"], done.stderr
