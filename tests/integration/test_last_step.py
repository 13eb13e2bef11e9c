"""One more step after the loop, as scripts with gradient accumulation make."""

import torch
from torch import nn

from psworker import Job
from tests.support.training_threads import simulated


def test_a_last_step_without_data_does_not_disturb_the_rounds() -> None:
    """Two batches a step and 9 an epoch; a worker without a batch left makes the step as well."""

    def trained(always: bool) -> list[tuple[list[int], bytes]]:
        def script(job: Job) -> tuple[list[int], bytes]:
            model = nn.Linear(1, 1)
            optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
            versions = []
            for _ in range(3):
                number = -1
                for number, batch in enumerate(job.batches(torch.arange(36), 4, shuffle=False)):
                    model(batch[:, None].float()).mean().backward()
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                        versions.append(job.version)
                if always or number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            return versions, torch.cat(
                [p.detach().flatten() for p in model.parameters()]
            ).numpy().tobytes()

        torch.manual_seed(0)
        return simulated(2, script, policy="sync")

    assert trained(always=True) == trained(always=False)
