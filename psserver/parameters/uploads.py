"""Weights and optimizer state that workers send under policy allreduce."""

from collections.abc import Collection

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.optim import KINDS
from pscommon.optim.specs import Groups
from pscommon.parameters.state_images import numbers_from_json


def check_upload(
    settings: OptimizerSettings, groups: Groups, states: Collection[str], state_json: str
) -> None:
    """Raise InvalidRequestError if the servers cannot continue with an upload.

    Args:
        settings: The job's optimizer.
        groups: Its hyper-parameters as of the upload.
        states: Names of the optimizer states that the upload has.
        state_json: State with one number per tensor.
    """
    kind = KINDS[settings.name]
    try:
        steps, scalars = numbers_from_json(state_json)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"upload refused: cannot read its state: {error!r}") from None
    stepped = {index for index, count in steps.items() if count}
    needed = {state.name for group in groups for state in kind.states_of(group)}
    known = {state.name for state in kind.states}
    if unknown := sorted({*states} - known):
        raise InvalidRequestError(f"upload refused: {settings.name} has no {', '.join(unknown)}")
    if stepped and (missing := sorted(needed.difference(states))):
        raise InvalidRequestError(f"upload refused: it lacks {', '.join(missing)}")
    for scalar in kind.scalars:
        if stepped - scalars.get(scalar.name, {}).keys():
            raise InvalidRequestError(f"upload refused: it lacks {scalar.name} of some tensors")
