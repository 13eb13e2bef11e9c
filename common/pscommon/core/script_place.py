"""Where a worker's script is: the passes that it is in, may still begin, or has left.

A pass is named by its loader and its count, so workers may begin their passes in different orders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple


class PassName(NamedTuple):
    """The name of a pass.

    Attributes:
        loader: Name of its loader: the one that the script gave, or the loader's place in the
            order of the unnamed loaders, in decimal digits.
        number: Passes of the loader before this one.
    """

    loader: str
    number: int

    def __str__(self) -> str:
        return f"pass {self.number + 1} of loader {self.loader!r}"


@dataclass(frozen=True, slots=True)
class ScriptPlace:
    """The place of a script at a request.

    Attributes:
        current: The pass that it asks about; None: the request is not about a pass.
        first_open: By loader, the first pass that the script is in or may still begin; it has left
            the earlier ones. A loader that is not here has no pass that was left.
        first_loader: Number of the first unnamed loader of which the script can begin a pass.
        training_passes: Outermost passes with gradients that the script has begun.
    """

    current: PassName | None = None
    first_open: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    first_loader: int = 0
    training_passes: int = 0

    def has_left(self, name: PassName) -> bool:
        """Return whether the script has left this pass, or can never begin it."""
        is_before = name.loader.isdecimal() and int(name.loader) < self.first_loader
        return is_before or name.number < self.first_open.get(name.loader, 0)

    def as_json(self) -> list[Any]:
        """Return JSON values for `place_from_json`."""
        current = list(self.current) if self.current is not None else None
        return [current, dict(self.first_open), self.first_loader, self.training_passes]


def place_from_json(raw: Sequence[Any]) -> ScriptPlace:
    """Return the place of a log or snapshot."""
    current, first_open, first_loader, training_passes = raw
    return ScriptPlace(
        PassName(*current) if current is not None else None,
        first_open,
        first_loader,
        training_passes,
    )
