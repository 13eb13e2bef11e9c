"""Check a push for NaN and Inf, and compute its part of the gradient norm."""

from dataclasses import replace

from pscommon.core.log_entries import Staged
from psserver.core.job.settings import GradientRules
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore


def check_gradient(
    staged: Staged, staging: Staging, store: ParameterStore, rules: GradientRules
) -> Staged:
    """Return `staged` with what the coordinator must know of the gradient.

    If the operator asked for it, NaN and Inf in gradients are replaced by zeros.
    """
    tensor = store.find_non_finite(staging)
    if tensor and rules.mends and not staging.initial:
        store.replace_non_finite(staging)
        # buffers cannot be mended
        staged, tensor = (
            replace(staged, mended=tensor),
            store.find_non_finite(staging),
        )
    if tensor:
        return replace(staged, problem=f"NON_FINITE: tensor {tensor}")
    # in a round of several the norm of their average matters; where that was not so, the
    # coordinator has it measured
    needs_norm = (
        rules.norms or (staged.optimizer in store.clipped and not store.averaged_last)
    ) and not staging.initial
    return replace(staged, square_norm=store.square_norm([staging])) if needs_norm else staged
