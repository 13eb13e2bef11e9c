"""Results of a user's type checker: correct scripts pass, wrong ones are reported."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import psworker

ARRAYS = """
import numpy as np
from numpy.typing import NDArray
import psworker

def train(spec: psworker.OptimizerSpec, job: psworker.Job) -> psworker.PushResult:
    w: NDArray[np.float32] = np.zeros(3, np.float32)
    with psworker.Client("host:1") as client:
        client.register({"w": w}, spec)
        params = client.pull()
        grads: dict[str, NDArray[np.float32] | None] = {"w": None}
        client.push(grads)
        client.report(norm=np.float32(1))
        return client.push_pull({"w": w}, out=params, samples=3)

train(psworker.OptimizerSpec("adam", lr=np.float32(1e-3), betas=(0.9, 0.99)), psworker.connect())
"""
TORCH = """
import torch
import psworker

job = psworker.connect()
model = torch.nn.Linear(3, 2).to(job.device)
optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
job.resume(torch.optim.lr_scheduler.StepLR(optimizer, 10))
try:
    for x, y in job.batches((torch.zeros(4, 3), torch.zeros(4, 2)), batch_size=2, epochs=3, seed=0):
        loss = torch.nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
except psworker.QuarantinedError:
    raise
job.report(accuracy=torch.tensor(1.0))
job.close()
"""
MISTAKE = """
import psworker

psworker.Clientt("host:1")
"""


@pytest.mark.timeout(300)
@pytest.mark.full
def test_mypy_accepts_correct_scripts_and_reports_wrong_ones(tmp_path: Path) -> None:
    """One run with its own cache; mypy crashes if another run has locked its cache."""
    pytest.importorskip("mypy")
    for name, script in {"arrays": ARRAYS, "torch_script": TORCH, "mistake": MISTAKE}.items():
        (tmp_path / f"{name}.py").write_text(script)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--no-error-summary",
        ".",
    ]

    found = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    (line,) = found.stdout.splitlines()
    assert line.startswith('mistake.py:4: error: Module has no attribute "Clientt"')
    assert found.returncode == 1


def test_numpy_numbers_are_accepted_as_numbers() -> None:
    spec = psworker.OptimizerSpec(
        "adam", lr=np.float32(0.5), betas=(np.float64(0.5), 0.25), amsgrad=np.bool_(True)
    )
    assert spec.groups == ({"lr": 0.5, "betas": (0.5, 0.25), "amsgrad": True},)
    assert [type(value) for value in spec.groups[0].values()] == [float, tuple, bool]
    assert psworker.OptimizerSpec.from_dict(spec.as_dict()).groups == spec.groups
