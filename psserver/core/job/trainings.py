"""The trainings of a job: each has its own model, optimizers, passes and collective results.

Theory of operation. A script names its training when it joins. The first name that a job meets is
that of its training. A worker with another name waits until the current training has no member
left. Then that training is over for good, and the coordinator begins the next one with an empty
state. A name that is over is refused, so a script that is started again can skip what is finished.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pscommon.core.errors import TrainingOver


@dataclass(frozen=True, slots=True)
class Trainings:
    """The names of a job's trainings.

    Attributes:
        current: The one that the job is in; empty: no worker has named it yet.
        finished: Those before it, in their order.
    """

    current: str = ""
    finished: tuple[str, ...] = ()

    def admits(self, name: str) -> bool:
        """Return whether a worker of this training may join now.

        name: Its training; empty: the current one.

        Raises:
            TrainingOver: The training is over.
        """
        if name in self.finished:
            raise TrainingOver(
                f"training {name!r} of this job is over; it is in training {self.current!r}. Try: "
                "`except psworker.TrainingOver`, and go on with the script's next training"
            )
        return not name or name == self.current or not self.current

    def named(self, name: str) -> "Trainings":
        """Return the trainings once a worker with this name has joined the current one."""
        return self if self.current or not name else Trainings(name, self.finished)

    def followed_by(self, name: str) -> "Trainings":
        """Return the trainings once the current one is over and the next one begins."""
        return Trainings(name, (*self.finished, self.current))

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`; a job of one unnamed training has none."""
        if not self.current and not self.finished:
            return {}
        return {"training": self.current, "trainings_finished": list(self.finished)}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "Trainings":
        return Trainings(raw.get("training", ""), tuple(raw.get("trainings_finished", ())))
