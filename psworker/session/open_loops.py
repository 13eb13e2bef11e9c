"""The passes of a script: open ones, those that it may still begin, and those that it has left."""

from collections import defaultdict
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import MAX_NAME_CHARACTERS
from pscommon.core.script_place import PassName, ScriptPlace


class LoopBatches(Protocol):
    """The batches of one pass that a worker has leased.

    Attributes:
        name: Name of the pass.
        spec: The loop.
    """

    name: PassName
    spec: Spec

    def forget(self) -> None:
        """Drop all leased and unused batches: the job has given them to other workers."""

    def give_back(self) -> None:
        """Return all leased and unused batches to the job."""


class OpenLoops:
    """The passes that a script is in or may still begin.

    `iter()` of a loader makes a pass, and the first `next()` begins it, perhaps inside a later
    pass: `rows = iter(job.batches(a))`, and `next(rows)` in a loop over b. Once two outermost
    passes have begun after it was made, the script keeps the pass for later use, and its place no
    longer counts it.

    Attributes:
        open: The passes that the script is in, the outermost first.
        count: Number of passes that the script has made.
        training_passes: Number of outermost passes with gradients that the script has begun.
    """

    def __init__(self) -> None:
        self.open: list[LoopBatches] = []
        self.count = self.training_passes = 0
        self._unnamed_count = 0
        self._unnamed: WeakValueDictionary[int, object] = WeakValueDictionary()
        self._pass_counts: defaultdict[str, int] = defaultdict(int)  # by loader
        self._made: WeakValueDictionary[PassName, object] = WeakValueDictionary()
        self._before_outermost: set[PassName] = set()  # passes made before it began
        self._passed: set[PassName] = set()
        self._behind = 0

    def name_loader(self, loader: object, name: str | None) -> str:
        """Return the name of a new loader: the given one, or its place among the unnamed ones.

        Raises:
            InvalidRequestError: The name is not valid.
        """
        if name is None:
            self._unnamed[self._unnamed_count] = loader
            self._unnamed_count += 1
            return str(self._unnamed_count - 1)
        is_text = isinstance(name, str) and name.isprintable()
        if not is_text or not 0 < len(name) <= MAX_NAME_CHARACTERS or name.isdecimal():
            raise InvalidRequestError(
                f"job.batches: name={name!r} is not valid. Try: 1 to {MAX_NAME_CHARACTERS} "
                "printable characters, not digits alone"
            )
        return name

    def place(self, current: PassName | None = None) -> ScriptPlace:
        """Return where the script is. current: The pass that a request is about."""
        reachable = [*self._made, *(batches.name for batches in self.open)]
        first_open = dict(self._pass_counts)
        for name in reachable:
            first_open[name.loader] = min(first_open[name.loader], name.number)
        unnamed = [int(name.loader) for name in reachable if name.loader.isdecimal()]
        first_loader = min([*self._unnamed, *unnamed], default=self._unnamed_count)
        return ScriptPlace(
            current,
            {
                loader: number
                for loader, number in first_open.items()
                if number and not (loader.isdecimal() and int(loader) < first_loader)
            },
            first_loader,
            self.training_passes,
        )

    def make(self, loader: str, iterator: object) -> PassName:
        """Add the next pass of a loader. It cannot begin once its iterator is deleted."""
        name = PassName(loader, self._pass_counts[loader])
        self._pass_counts[loader] += 1
        self.count += 1
        self._made[name] = iterator
        return name

    def discard(self, name: PassName) -> None:
        """Remove a pass that was made and will not begin."""
        self._made.pop(name, None)

    def begin(self, batches: LoopBatches, trains: bool) -> None:
        """Open a pass, inside the passes that are open already.

        trains: Gradients are on.
        """
        self.discard(batches.name)
        if not self.open:
            for name in self._before_outermost:
                self.discard(name)
            self._before_outermost = set(self._made)
            self.training_passes += trains
        self.open.append(batches)

    def passed(self, name: PassName) -> None:
        """Record that all batches of this pass have counted.

        A pass inside another one is not recorded: it may run again together with the outer pass.
        """
        if self.open[0].name == name:
            self._passed.add(name)

    def end(self, batches: LoopBatches, version: int) -> None:
        """Close a pass that the script has left, at its end or before.

        version: Version after the last push in the pass; 0: there was no push.
        """
        self.open.remove(batches)
        # A pass of `_passed` needs no version: `come_again` checks its name.
        if not self.open and batches.name not in self._passed:
            self._behind = max(self._behind, version)

    def come_again(self, has_ended: Callable[[PassName], bool], version: int) -> bool:
        """Return whether the servers have rolled back work of a pass that the script has left.

        has_ended: Returns whether a pass has ended on the servers.
        version: The servers' version.
        """
        return version < self._behind or not all(map(has_ended, self._passed))
