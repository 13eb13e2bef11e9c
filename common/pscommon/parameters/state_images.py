"""Optimizer state as images of the flat buffer: how workers and servers pass it on."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pscommon.optim.specs import Scalars
from pscommon.parameters.optimizer import FlatOptimizer
from pscommon.parameters.partition import raw


class StateImages(NamedTuple):
    """Optimizer state that lies like the trainable tensors (implements StateReader).

    Attributes:
        images: The bytes of each state, by torch's name.
        numbers: The steps of each tensor, and state with one number per tensor.
        start: Where the images begin in the flat buffer.
    """

    images: Mapping[str, memoryview]
    numbers: tuple[Mapping[int, int], Scalars]
    start: int = 0

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        out[:] = self.images[kind][start - self.start : stop - self.start]
        return True

    def kinds(self) -> set[str]:
        return {*self.images}

    def steps(self) -> dict[int, int]:
        return dict(self.numbers[0])

    def scalars(self) -> Scalars:
        return self.numbers[1]


def images_of(optimizer: FlatOptimizer, nbytes: int) -> dict[str, memoryview]:
    """Return copies of the states of an optimizer of the whole model, `nbytes` bytes each."""
    images: dict[str, memoryview] = {}
    for name, start, tensor in optimizer.state():
        image = images.setdefault(name, memoryview(bytearray(nbytes)))
        image[start : start + tensor.nbytes] = raw(tensor)
    return images


def numbers_to_json(optimizer: FlatOptimizer) -> str:
    """Return steps and scalars as JSON, which keeps every bit; `numbers_from_json` reads it."""
    scalars = {name: dict(values) for name, values in optimizer.scalars().items()}
    return json.dumps({"steps": optimizer.steps(), "scalars": scalars})


def numbers_from_json(text: str) -> tuple[dict[int, int], dict[str, dict[int, float]]]:
    """Return steps and scalars.

    Raises:
        AttributeError, KeyError, RecursionError, TypeError, ValueError: It is no such text.
    """
    given: Any = json.loads(text) if text else {"steps": {}, "scalars": {}}
    steps = {int(index): int(count) for index, count in given["steps"].items()}
    scalars = {
        str(name): {int(index): float(value) for index, value in values.items()}
        for name, values in given["scalars"].items()
    }
    return steps, scalars
