"""Learning rate schedulers of a resumed job."""

import warnings

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pscommon.core.errors import InvalidRequestError


def fast_forward(scheduler: LRScheduler, steps: int) -> None:
    """Step a fresh scheduler `steps` times.

    Raises:
        InvalidRequestError: The scheduler depends on measured values, which no job keeps.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidRequestError(
            "ReduceLROnPlateau depends on measured values, which no job keeps. Try: save and load "
            "its state_dict()"
        )
    with warnings.catch_warnings():
        # torch expects steps of the optimizer, which earlier workers have made
        warnings.filterwarnings(
            "ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before"
        )
        for _ in range(steps):
            scheduler.step()
