"""What a command to the coordinator is: its name and arguments on disk, its check, its effect."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

from psserver.core.coordinator.machine import CoordinatorMachine

Reply = TypeVar("Reply", covariant=True)


@dataclass(frozen=True, slots=True)
class Command(ABC, Generic[Reply]):
    """A request to the coordinator with its arguments. `Reply` is the type of its answer.

    Attributes:
        wire_name: Its name in logs on disk, which never changes.
    """

    wire_name: ClassVar[str]

    @abstractmethod
    def perform(self, coordinator: CoordinatorMachine, now: float) -> Reply:
        """Carry out the command. The reply depends only on the state, the arguments and `now`."""

    def as_json(self) -> Mapping[str, Any]:
        """Return the arguments as JSON values, in the order in which they are on disk.

        They are the fields, unless a command has another form there.
        """
        return asdict(self)

    @classmethod
    def from_json(cls, *args: Any, **arguments: Any) -> "Command[Any]":
        """Return the command with these arguments of `as_json`."""
        return cls(*args, **arguments)

    def check(self, coordinator: CoordinatorMachine) -> None:
        """Raise InvalidRequestError if no correct process sends these arguments.

        A replay does not check: it carries out the commands of earlier releases unchanged.
        """
        return

    def repetition_state(self, coordinator: CoordinatorMachine) -> tuple[object, ...] | None:
        """Return all state that a repetition of this request can change; None: always write it."""
        return None
