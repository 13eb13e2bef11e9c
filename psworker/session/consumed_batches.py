"""Batches that the script has received, and the weight of each optimizer's next step.

A step weighs the samples whose gradient it pushes. A batch counts if a gradient was added between
its delivery and the next request for a batch of its loop, or the step. So a batch that the script
leaves out has no weight, and several batches, also of several loaders, may make one step.
"""

from collections.abc import Iterable
from typing import Protocol

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.log_entries import BatchKey


class Gradients(Protocol):
    """The gradients of one optimizer's parameters."""

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient."""

    def mark(self) -> None:
        """Compare later gradients with the current ones."""

    def has_changed(self) -> bool:
        """Return whether a gradient was added since `mark`."""


class NextStep:
    """The next step of one optimizer.

    gradients: What the step pushes.

    Attributes:
        samples: Samples received since the last step.
        all_samples: The same, of all ranks of the group.
        has_batches: A batch was received since the last step.
        weight: Those of them that count.
        own, total: Samples of this rank and of all ranks since torch last reduced gradients.
        shares: This rank's part in the samples of each batch that counts, since then.
        undecided: By loop, the newest batch: its samples, how many changes of gradients were
            known at its delivery, and this rank's part in its samples.
        lost: Why the step must not count: its gradients are of another membership, or of weights
            that are not the job's.
        is_open: The step has the gradients of some batches of an update (--global-batch).
        misses_batches: Another optimizer pushed while this step still lacked gradients of the
            update.
    """

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.undecided: dict[int, tuple[int, int, float]] = {}
        self.shares: set[float] = set()
        self.finish()

    def finish(self) -> None:
        """End the step, and begin the following one."""
        self.forget_samples()
        self.lost = None
        self.is_open = self.misses_batches = False

    def forget_samples(self) -> None:
        """Forget the batches so far: their gradients are added up, pushed or dropped."""
        self.samples = self.all_samples = self.weight = 0
        self.has_batches = False
        self.undecided.clear()
        self._forget_reduced()

    def _forget_reduced(self) -> None:
        self.own = self.total = 0
        self.shares.clear()
        self._is_reduced = False

    def receive(self, loop: int, samples: int, all_samples: int, changes: int) -> None:
        """Add a batch of a loop. changes: Known up to now."""
        if self._is_reduced:
            self._forget_reduced()
        self.samples += samples
        self.all_samples += all_samples
        self.own += samples
        self.total += all_samples
        self.has_batches = True
        self.undecided[loop] = samples, changes, samples / max(1, all_samples)

    def share(self, size: int) -> float:
        """Return this rank's part in the samples of gradients that torch reduces now.

        size: Number of ranks with data of their own, which are alike without `job.batches`.
        """
        self._is_reduced = True
        return self.own / self.total if self.total else 1 / size

    def decide(self, loops: Iterable[int], changes: int) -> None:
        """Decide whether the newest batches of these loops count. changes: Known up to now."""
        for loop in loops:
            samples, known, share = self.undecided.pop(loop, (0, changes, 0.0))
            if changes > known:
                self.weight += samples
                self.shares.add(share)

    def void(self, samples: int) -> int:
        """Forget up to `samples` received samples if there is no gradient; return how many."""
        if self.gradients.has_gradients():
            return 0
        unused = min(self.samples, samples)
        if self.samples:  # ranks have equally large parts
            self.all_samples -= self.all_samples * unused // self.samples
        self.samples -= unused
        self._forget_reduced()
        self.own, self.total, self.weight = self.samples, self.all_samples, 0
        self.has_batches = self.has_batches and self.samples > 0
        return unused

    samples: int
    all_samples: int
    own: int
    total: int
    has_batches: bool
    weight: int
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
        self.samples = self._changes = 0
        self.steps: list[NextStep] = []
        self._clear()

    def add(
        self, key: BatchKey, samples: int | None, all_samples: int, following: int | None
    ) -> None:
        """Add a batch.

        samples: Those that count on this rank; None: the batch is not trained on.
        all_samples: Those of all ranks.
        following: Batches that belong to the same push; None: each may be a push of its own.
        """
        self.batches = (*self.batches, key)
        self.samples += samples or 0
        self.decide(key.loop)
        for step in self.steps if samples is not None else ():
            step.receive(key.loop, samples or 0, all_samples, self._changes)
            step.gradients.mark()
        self.shared = following is not None
        if samples is not None and following is not None:
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
            if not step.gradients.has_gradients():
                step.forget_samples()

    def decide(self, loop: int) -> None:
        """Decide whether the newest batch of a loop counts: the script asks for another one."""
        self._find_changes()
        for step in self.steps:
            step.decide([loop], self._changes)

    def _find_changes(self) -> None:
        """Count a change if any optimizer has got a gradient."""
        if any(step.undecided for step in self.steps) and any(
            step.gradients.has_changed() for step in self.steps
        ):
            self._changes += 1

    def weigh(self, step: NextStep) -> int:
        """Return the samples of the gradients that a step is about to push.

        One weight cannot make a mean of batches that ranks share in different ways: this raises
        InvalidRequestError.

        If no batch counts, those that were just used do: their gradients came in a way that nothing
        shows. Without any gradient the batches count as zeros.
        """
        if not step.gradients.has_gradients():
            return step.samples
        self._find_changes()
        used = sum(samples for samples, *_ in step.undecided.values())
        step.decide([*step.undecided], self._changes)
        if len(step.shares) > 1:
            raise InvalidRequestError(
                "the ranks of this group have added up gradients of batches that they share in "
                "different ways, as an uneven last one. Try: drop_last=True in job.batches, or a "
                "step for each batch"
            )
        return step.weight or used

    def drop_gradients(self, step: NextStep) -> None:
        """Record that the script has dropped a step's gradients, so the batches do not count.

        With several optimizers a batch counts for all of them or for none.
        """
        if step.undecided:
            step.gradients.mark()
        if len(self.steps) == 1:
            step.weight = 0
            step.shares.clear()
            for loop, (samples, _, share) in step.undecided.items():
                step.undecided[loop] = samples, self._changes, share

    def void(self, samples: int) -> int:
        """Take the weight from all samples after the first `samples`, in steps without gradients.

        They were evaluated, or the script has dropped their gradients.

        Returns:
            Number of samples that lose their weight.
        """
        since = self.samples - samples
        return max((step.void(since) for step in self.steps), default=0)

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

    def new_step(self, gradients: Gradients) -> NextStep:
        """Return the first step of an optimizer; see NextStep."""
        self.steps.append(NextStep(gradients))
        return self.steps[-1]

    def has_none_for(self, step: NextStep) -> bool:
        """Return whether the script trains on batches of a loop and received none for a step."""
        return self.dealt and not step.has_batches and step.lost is None

    def _clear(self) -> None:
        self.batches, self.following, self._ended = (), 0, False
