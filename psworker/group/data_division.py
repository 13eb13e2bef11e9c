"""Which part of a batch each rank of a group computes."""

from typing import Any

from pscommon.core.errors import InvalidRequestError
from psworker.core.group_place import GroupPlace


class DataDivision:
    """The division of the job's batches among the ranks of a group.

    Ranks that compute one model together, as by a tensor-parallel plan, share their data. The
    model says it, or the device mesh of `job.batches`. All batches of a job are divided alike.

    Attributes:
        place: Which part of each batch this rank computes.
        ranks: The place of this rank among all ranks.
    """

    def __init__(self, place: GroupPlace) -> None:
        self.place = self.ranks = place
        self._models: set[GroupPlace | None] = set()
        self._is_divided = self._has_mesh = False

    def expect(self, place: GroupPlace | None) -> None:
        """Set what one of the script's models says; None: it does not say it, so a mesh has to.

        The same holds for models that differ.
        """
        self._models.add(place)
        wanted = self._of_models()
        is_known = self._has_mesh if wanted is None else wanted == self.place
        if self._is_divided and not is_known:
            raise InvalidRequestError(
                "job.optimizer failed: job.batches has divided batches among "
                f"{self.place.size} ranks, which does not fit to this model. Try: job.optimizer "
                "before job.batches; mesh= of job.batches as docs/parallelism.md has it"
            )
        self.place = self.place if self._is_divided else wanted or self.place

    def _of_models(self) -> GroupPlace | None:
        return next(iter(self._models)) if len(self._models) == 1 else None

    def divide(self, place: GroupPlace | None) -> GroupPlace:
        """Return which part of each batch this rank computes.

        place: By the mesh of this call of job.batches; None: it has none.
        """
        wanted = self._of_models()
        if place is None and self._models and wanted is None and not self._has_mesh:
            raise InvalidRequestError(
                "job.batches failed: the model does not say which ranks have data of their own. "
                'Try: job.batches(..., mesh=mesh["dp"]), the dimension of the device mesh along '
                "which data differ"
            )
        if place is not None and place != (self.place if self._is_divided else wanted or place):
            raise InvalidRequestError(
                f"job.batches failed: this mesh divides batches among {place.size} ranks, and the "
                f"model or another call among {self.place.size}. Try: the same mesh in all calls, "
                "or leave out mesh="
            )
        self._is_divided, self._has_mesh = True, self._has_mesh or place is not None
        self.place = place or self.place
        return self.place


def place_in(mesh: Any) -> GroupPlace:
    """Return the place of this process in a device mesh, of any number of dimensions.

    Raises InvalidRequestError if it is in none.
    """
    coordinates = mesh.get_coordinate() if hasattr(mesh, "get_coordinate") else None
    if coordinates is None:
        raise InvalidRequestError(
            f"job.batches failed: mesh={mesh!r} is no device mesh with this rank. Try: a dimension "
            'of init_device_mesh(...), such as mesh["dp"]'
        )
    rank = 0
    for coordinate, size in zip(coordinates, mesh.shape, strict=True):
        rank = rank * size + coordinate
    return GroupPlace(rank, mesh.size())
