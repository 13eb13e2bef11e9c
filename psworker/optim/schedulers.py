"""Learning rate schedulers of a job that goes on."""

import warnings

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pscommon.core.errors import InvalidRequestError


def fast_forward(scheduler: LRScheduler, steps: int) -> None:
    """Step a fresh scheduler as often as the job has; InvalidRequestError for one that goes by
    measurements.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidRequestError(
            "ReduceLROnPlateau goes by what was measured, which no job keeps: save and load its "
            "state_dict()"
        )
    with warnings.catch_warnings():
        # torch misses the optimizer's steps, which earlier workers have made
        warnings.filterwarnings(
            "ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before"
        )
        for _ in range(steps):
            scheduler.step()
