"""The batches that the script has in hand."""

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.log_entries import BatchKey


class ConsumedBatches:
    """Batches that were handed to the script since its last push: the next one commits them.

    samples: since the last step. following: how many more batches belong to that push
    (--global-batch). lost: why that step must not count, because it uses gradients of a place
    that this worker has lost. dealt: the script has begun with a loop. shared: the servers say
    which batches make an update (--global-batch).
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
        """Was nothing handed out to train on, in a script whose rounds go by the data that it is
        dealt?
        """
        return self.dealt and not self.samples and self.lost is None

    def add(self, key: BatchKey, samples: int, following: int | None) -> None:
        """following: None where each batch may be a push of its own. A batch without samples is
        not trained on.
        """
        self.batches = (*self.batches, key)
        self.samples += samples
        self.shared = following is not None
        if samples and following is not None:
            self._check_whole()
            self.following, self._ended = following, following == 0

    def _check_whole(self) -> None:
        if self._ended:
            raise InvalidRequestError(
                "--global-batch decides how many batches make an update, so call optimizer.step() "
                "after each batch: "
                "with gradients that are None for one to be left out; where there is nothing to "
                "train, go through "
                "job.batches under torch.no_grad()"
            )

    def begin(self) -> None:
        """A loop begins: the end of an update at which the one before it was left needs no step
        any more.
        """
        self._ended, self.dealt = False, True

    def lose(self, error: PSError) -> None:
        """The batches so far went back to the pool; those that are still to come are this
        worker's.
        """
        self.batches, self.following, self._ended, self.lost = (), 0, False, error

    def clear(self) -> None:
        self.batches, self.lost = (), None
        self.samples = self.following = 0
        self._ended = False
