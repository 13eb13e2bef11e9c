"""Batches that the script has received, and the weight of each optimizer's next step."""

from collections.abc import Callable

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.log_entries import BatchKey


class NextStep:
    """The next step of one optimizer.

    has_gradients: Returns whether the step would push something.

    Attributes:
        samples: Samples since the last step.
        lost: Why the step must not count: its gradients are of another membership, or of weights
            that are not the job's.
        is_open: The step has the gradients of some batches of an update (--global-batch).
        misses_batches: Another optimizer pushed while this step still lacked gradients of the
            update.
    """

    def __init__(self, has_gradients: Callable[[], bool]) -> None:
        self.has_gradients = has_gradients
        self.finish()

    def finish(self) -> None:
        """End the step, and begin the following one."""
        self.samples, self.lost = 0, None
        self.is_open = self.misses_batches = False

    samples: int
    lost: PSError | None
    is_open: bool
    misses_batches: bool


class ConsumedBatches:
    """Batches that the script has received since its last push; the next push commits them.

    Attributes:
        batches: Keys of the batches.
        samples: Samples of all batches so far, without those that were only evaluated.
        following: Number of batches still missing to the next push (--global-batch).
        dealt: The script has begun a loop.
        shared: The servers decide which batches make an update (--global-batch).
        steps: The next step of each optimizer.
    """

    batches: tuple[BatchKey, ...]
    following: int

    def __init__(self) -> None:
        self.dealt = self.shared = False
        self.samples = 0
        self.steps: list[NextStep] = []
        self._clear()

    def add(self, key: BatchKey, samples: int, following: int | None) -> None:
        """Add a batch; one without samples is not trained on.

        following: Batches that belong to the same push; None: each may be a push of its own.
        """
        self.batches = (*self.batches, key)
        self.samples += samples
        for step in self.steps:
            step.samples += samples
        self.shared = following is not None
        if samples and following is not None:
            self._check_update_is_open()
            self.following, self._ended = following, following == 0

    def _check_update_is_open(self) -> None:
        if self._ended or any(step.misses_batches for step in self.steps):
            raise InvalidRequestError(
                "optimizer.step() is missing after a batch: `--global-batch` decides which batches "
                "make an update. Try: step() after each batch; evaluate under torch.no_grad()"
            )

    def begin(self) -> None:
        """Begin a loop: the unfinished update of the previous loop needs no step any more."""
        self._ended, self.dealt = False, True
        for step in self.steps:
            step.misses_batches = False
            if not step.has_gradients():
                step.samples = 0

    def void(self, samples: int) -> int:
        """Take the weight from all samples after the first `samples`, in steps without gradients.

        They were evaluated, or the script has dropped their gradients.

        Returns:
            Number of samples that lose their weight.
        """
        since, largest = self.samples - samples, 0
        for step in self.steps:
            if not step.has_gradients():
                unused = min(step.samples, since)
                step.samples -= unused
                largest = max(largest, unused)
        return largest

    def finish_push(self, step: NextStep) -> None:
        """Record a push of a step, which commits the batches."""
        for other in self.steps:
            other.misses_batches = other.is_open
        step.finish()
        self._clear()

    def lose(self, error: PSError, every_step: bool = False) -> None:
        """Drop the batches: the job took them back with the lost membership.

        A step that would weigh any of them must not count.

        every_step: The next step of each optimizer must not count.
        """
        for step in self.steps:
            if every_step or self.batches or step.samples:
                step.lost = error
        self._clear()

    def new_step(self, has_gradients: Callable[[], bool]) -> NextStep:
        """Return the first step of an optimizer; see NextStep."""
        self.steps.append(NextStep(has_gradients))
        return self.steps[-1]

    def has_none_for(self, step: NextStep) -> bool:
        """Return whether the script trains on batches of a loop and received none for a step."""
        return self.dealt and not step.samples and step.lost is None

    def _clear(self) -> None:
        self.batches, self.following, self._ended = (), 0, False
