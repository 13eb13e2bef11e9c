"""Training on a parameter server, seen from a worker.

`connect` gives a PyTorch script its job; `Client` moves numpy arrays for anything else.
Importing this package loads neither torch nor gRPC; the first use of a name that needs them does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, SupportsFloat

from pscommon.core.errors import (
    AuthenticationError,
    FencedError,
    InvalidRequestError,
    MismatchError,
    NonFiniteError,
    NotSavedError,
    PSError,
    QuarantinedError,
    SnapshotError,
    TakenError,
    TooFewWorkersError,
    TrainingOver,
    UnreachableError,
    UnsupportedOptimizerError,
    WaitTimeoutError,
)
from pscommon.core.model_spec import OptimizerSettings as _OptimizerSpec
from pscommon.core.model_spec import Scalar
from psworker.connect import connect
from psworker.session.arguments import clip_norm_of
from psworker.session.drain import DrainedError, Stopping

if TYPE_CHECKING:
    from pscommon.optim import Lion
    from psworker.client.client import Client
    from psworker.core.results import PushResult
    from psworker.data.stream_dataset import StreamDataset
    from psworker.job import Job
    from psworker.run.from_python import launch
    from psworker.training import DistributedTraining

    __version__: str

__all__ = [
    "AuthenticationError",
    "Client",
    "DistributedTraining",
    "DrainedError",
    "FencedError",
    "InvalidRequestError",
    "Job",
    "Lion",
    "MismatchError",
    "NonFiniteError",
    "NotSavedError",
    "OptimizerSpec",
    "PSError",
    "PushResult",
    "QuarantinedError",
    "SnapshotError",
    "Stopping",
    "StreamDataset",
    "TakenError",
    "TooFewWorkersError",
    "TrainingOver",
    "UnreachableError",
    "UnsupportedOptimizerError",
    "WaitTimeoutError",
    "connect",
    "launch",
]

_LAZY = {
    "Client": "psworker.client.client",
    "DistributedTraining": "psworker.training",
    "Job": "psworker.job",
    "Lion": "pscommon.optim",
    "PushResult": "psworker.core.results",
    "StreamDataset": "psworker.data.stream_dataset",
    "launch": "psworker.run.from_python",
}


class OptimizerSpec(_OptimizerSpec):
    """An optimizer for `Client.register`: `OptimizerSpec("adam", lr=1e-3, betas=(0.9, 0.99))`.

    Args:
        name: A class of torch.optim or psworker in lower case (sgd, adamw, lion, ...), or one of
            --optimizers MODULE.
        clip_norm: Clip the averaged gradient of each update to this L2 norm. None: do not clip.
        hyper: Hyper-parameters. Others have the class's defaults. `Client.register` checks them.
    """

    def __init__(
        self, name: str, *, clip_norm: SupportsFloat | None = None, **hyper: Scalar | SupportsFloat
    ) -> None:
        groups = ({key: _plain(value) for key, value in hyper.items()},)
        super().__init__(name, groups, clip_norm_of(clip_norm))


def _plain(value: Any) -> Any:
    """Return a number of numpy or torch as a Python number."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


if not TYPE_CHECKING:  # there, the names are imported above, and others are errors

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from pscommon.system.imports import installed

            return installed("paramserver")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY, "__version__"})
