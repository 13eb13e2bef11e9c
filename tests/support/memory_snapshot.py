"""A snapshot in memory."""

import torch
from torch import Tensor

from pscommon.optim.specs import Scalars, groups_to_json, scalars_from_json, scalars_to_json
from tests.support.stores import Shards


class MemorySnapshot:
    """A snapshot in memory: the exports of the shards by position in the flat buffer."""

    def __init__(self, job: Shards) -> None:
        self._bytes: dict[str, dict[int, bytes]] = {}
        self._steps = {
            index: count for store in job.stores for index, count in store.steps().items()
        }
        self._scalars: dict[str, dict[int, float]] = {}
        for store in job.stores:
            for name, values in store.scalars().items():
                known = self._scalars.setdefault(name, {})
                assert all(known.get(index, value) == value for index, value in values.items())
                known.update(values)
        self._groups = groups_to_json(job.stores[0].groups())
        for store in job.stores:
            for key, tensor in store.export().items():
                kind, _, start = key.partition("@")
                assert tensor.dim() == 1
                self._bytes.setdefault(kind, {})[int(start)] = (
                    tensor.view(torch.uint8).numpy().tobytes()
                )

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        """Read piece by piece, up to the end of each."""
        position = start
        for at, data in sorted(self._bytes.get(kind, {}).items()):
            if at <= position < at + len(data):
                part = data[position - at : stop - at]
                out[position - start : position - start + len(part)] = part
                position += len(part)
        return position == stop

    def kinds(self) -> set[str]:
        return set(self._bytes)

    def steps(self) -> dict[int, int]:
        return self._steps

    def scalars(self) -> Scalars:
        return scalars_from_json(scalars_to_json(self._scalars))

    def groups_json(self) -> str:
        return self._groups

    def forget(self, kind: str) -> None:
        del self._bytes[kind]


def contents(export: dict[str, Tensor]) -> dict[str, bytes]:
    """Return bytes, because padding may hold NaN."""
    return {key: tensor.view(torch.uint8).numpy().tobytes() for key, tensor in export.items()}
