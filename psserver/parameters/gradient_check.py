"""Is a gradient fit to be counted? What one shard can see of it: NaN and Inf, and its part of
the norm.
"""

from dataclasses import replace

from pscommon.core.log_entries import Staged
from psserver.core.job.settings import GradientRules
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore


def examined(
    staged: Staged, staging: Staging, store: ParameterStore, fitness: GradientRules
) -> Staged:
    """What is to be reported of a push; where the operator wants it, NaN and Inf in it are zeros
    afterwards.
    """
    tensor = store.find_non_finite(staging)
    if tensor and fitness.mends and not staging.initial:
        store.mend(staging)
        staged, tensor = (
            replace(staged, mended=tensor),
            store.find_non_finite(staging),
        )  # buffers cannot be mended
    if tensor:
        return replace(staged, problem=f"NON_FINITE: tensor {tensor}")
    # in a round of several the norm of their average matters; where that was not so, the
    # coordinator has it measured
    looks = (fitness.norms or (store.clips and not store.averages)) and not staging.initial
    return replace(staged, square_norm=store.square_norm([staging])) if looks else staged
