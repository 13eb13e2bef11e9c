"""Torch's own tools do with a job's optimizer what they do with any other."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from psworker.job import Job
from psworker.local import LocalClient
from psworker.optimizer import ServerOptimizer


def started(client: LocalClient, overlap: bool = False) -> tuple[Job, ServerOptimizer, nn.Linear]:
    torch.manual_seed(0)
    job, model = Job(client), nn.Linear(3, 2)
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, overlap=overlap)
    return job, optimizer, model


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}])
def test_distributed_checkpoints_make_no_step(options: dict[str, Any]) -> None:
    """Where an optimizer has no state torch makes some, by a step with gradients of zero."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    job, optimizer, model = started(LocalClient())
    for _ in range(2):
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
        optimizer.param_groups[0]["lr"] = 0.5
        set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(**options))

    assert job.version == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
