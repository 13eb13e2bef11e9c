"""Find NaN and Inf in pushes."""

from pscommon.core.partition import cut
from pscommon.parameters.finite_values import find_in_buffers, find_in_gradients, is_finite
from pscommon.parameters.partition import RoleBuffers, SameGradientRange
from pscommon.system.thread_team import ThreadTeam
from psserver.parameters.staging import Staging


def find_non_finite(staging: Staging, weights: RoleBuffers, team: ThreadTeam) -> str:
    """Return the name of the first tensor with NaN or Inf in a push; empty if there is none.

    Checks gradients and floating buffers; of initial weights only the trainable ones. A buffer may
    have such a value where the weights have one (an attention mask's -inf). Thread-safe.
    """
    partition, memory = staging.partition, staging.require_memory()

    def is_piece_finite(piece: SameGradientRange) -> bool:
        parts = cut(piece.span, team.parts(piece.span.nbytes))
        return all(
            team.map(lambda part: is_finite(partition.view(memory, piece.dtype, *part)), parts)
        )

    found = ""
    if not staging.gradients_are_finite:
        found = find_in_gradients(partition, memory, staging.absent_here, is_piece_finite)
    return found or ("" if staging.initial else find_in_buffers(partition, memory, weights))


def replace_non_finite(staging: Staging) -> None:
    """Replace NaN and Inf in the gradients by zeros."""
    partition = staging.partition
    for piece in partition.pieces((staging.absent_here,)):
        view = partition.view(staging.require_memory(), piece.dtype, *piece.span)
        view.nan_to_num_(0.0, 0.0, 0.0)
