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
        self._models = set[GroupPlace | None]()
        self._needs_mesh = self._is_divided = self._excludes_mesh = False

    def expect(self, place: GroupPlace | None, excludes_mesh: bool = False) -> None:
        """Set what one of the script's models says.

        place: None: the model does not say it, so a mesh has to, as for different models.
        excludes_mesh: No mesh can say anything else.
        """
        self._excludes_mesh = excludes_mesh
        self._models.add(place)
        place = place if len(self._models) == 1 else None
        if self._is_divided and place is not None and place != self.place:
            raise InvalidRequestError(
                f"job.optimizer failed: this model divides a batch among {place.size} ranks, and "
                f"job.batches has divided it among {self.place.size}. Try: job.optimizer before "
                "job.batches, or the mesh= of job.batches"
            )
        if not self._is_divided:
            self._needs_mesh = place is None
            self.place = place or self.place

    def divide(self, place: GroupPlace | None) -> GroupPlace:
        """Return which part of each batch this rank computes.

        place: By the mesh of this call of job.batches; None: it has none.
        """
        if place is None and self._needs_mesh:
            raise InvalidRequestError(
                "job.batches failed: the model does not say which ranks have data of their own. "
                'Try: job.batches(..., mesh=mesh["dp"]), the dimension of the device mesh along '
                "which data differ"
            )
        if place is not None and self._is_divided and place != self.place:
            raise InvalidRequestError(
                f"job.batches failed: batches are divided among {self.place.size} ranks already, "
                f"and this mesh has {place.size}. Try: the same mesh in all calls"
            )
        if self._excludes_mesh and place not in (None, self.ranks):
            raise InvalidRequestError(
                "job.batches failed: with DistributedDataParallel all ranks have data of their "
                "own. Try: leave out mesh="
            )
        self._is_divided, self._needs_mesh = True, False
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
