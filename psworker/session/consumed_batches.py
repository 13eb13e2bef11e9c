"""Batches that the script has received and not pushed yet."""

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.log_entries import BatchKey


class ConsumedBatches:
    """Batches that the script has received since its last push; the next push commits them.

    Attributes:
        batches: Keys of the batches.
        samples: Samples since the last step.
        following: Number of batches still missing to the next push (--global-batch).
        lost: Why the next step must not count: it uses gradients of a lost membership.
        dealt: The script has begun a loop.
        shared: The servers decide which batches make an update (--global-batch).
    """

    batches: tuple[BatchKey, ...]
    samples: int
    following: int
    lost: PSError | None

    def __init__(self) -> None:
        self.dealt = self.shared = False
        self.clear()

    @property
    def nothing(self) -> bool:
        """True if the script trains on batches of a loop and holds none."""
        return self.dealt and not self.samples and self.lost is None

    def add(self, key: BatchKey, samples: int, following: int | None) -> None:
        """Add a batch; one without samples is not trained on.

        following: Batches that belong to the same push; None: each may be a push of its own.
        """
        self.batches = (*self.batches, key)
        self.samples += samples
        self.shared = following is not None
        if samples and following is not None:
            self._check_update_is_open()
            self.following, self._ended = following, following == 0

    def _check_update_is_open(self) -> None:
        if self._ended:
            raise InvalidRequestError(
                "optimizer.step() is missing after a batch: `--global-batch` decides which batches "
                "make an update. Try: step() after each batch; evaluate under torch.no_grad()"
            )

    def begin(self) -> None:
        """Begin a loop: the unfinished update of the previous loop needs no step any more."""
        self._ended, self.dealt = False, True

    def lose(self, error: PSError) -> None:
        """Drop the batches: the job took them back with the lost membership."""
        self.batches, self.following, self._ended, self.lost = (), 0, False, error

    def clear(self) -> None:
        self.batches, self.lost = (), None
        self.samples = self.following = 0
        self._ended = False
