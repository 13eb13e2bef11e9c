"""Weights and optimizer state that workers send under policy allreduce: they make the steps.

Each state of the optimizer is one push, then the weights are one. A shard keeps the states until
the weights come, so its arrays always belong to one version.
"""

from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import WEIGHT
from pscommon.core.model_spec import ModelSpec
from pscommon.optim import KINDS
from pscommon.parameters.state_images import numbers_from_json


def check_upload(model: ModelSpec, kind: str, state_json: str) -> None:
    """Raise InvalidRequestError if the servers cannot take an upload of this kind."""
    kinds = [KINDS[each.name] for each in model.optimizers.values()]
    known = {state.name for each in kinds for state in each.states} | {WEIGHT}
    if kind not in known:
        raise InvalidRequestError(
            f"upload refused: {kind!r} is not one of {', '.join(sorted(known))}"
        )
    try:
        steps, scalars = numbers_from_json(state_json)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"upload refused: cannot read its state: {error!r}") from None
    stepped = {index for index, count in steps.items() if count}
    for scalar in (each.name for one in kinds for each in one.scalars):
        if kind == WEIGHT and stepped - scalars.get(scalar, {}).keys():
            raise InvalidRequestError(f"upload refused: it lacks {scalar} of some tensors")
