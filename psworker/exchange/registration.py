"""Registration of the worker's model at the coordinator, and the partition that follows."""

from functools import partial

from pscommon.core.errors import MismatchError, PSError
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.wire import messages as codec
from pscommon.wire.requests import REGISTER
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.connection import Connection


def register(connection: Connection, spec: ModelSpec | None) -> co.RegisterResponse:
    """Return the coordinator's answer once the weights are ready, or are to be uploaded.

    spec: The worker's model; None for an observer.
    """
    membership, retry = connection.membership, connection.new_retry("registering the model")
    request = co.RegisterRequest(
        job=membership.job,
        worker=membership.worker,
        model=codec.model_to_proto(spec) if spec else None,
        observe=spec is None,
        seed=connection.seed,
    )
    while True:
        request.wait_ms = round(retry.next_wait_seconds() * 1000)
        timeout = request.wait_ms / 1000 + connection.call_seconds
        answer = retry.ask(partial(connection.transport.request, REGISTER, request, timeout))
        membership.learn_standing(answer)
        membership.update_counts = dict(answer.updates)
        if answer.state in (co.RegisterResponse.STATE_READY, co.RegisterResponse.STATE_UPLOAD):
            connection.seed = answer.seed
            if membership.worker:
                # A shard that was just restarted may be behind the other shards.
                membership.require_version(answer.version)
            return answer
        if answer.state != co.RegisterResponse.STATE_PENDING:
            raise PSError(f"shard 0 answered to Register with state {answer.state}")
        retry.handle_wait(answer.waiting_for)


def plan_of(connection: Connection, answer: co.RegisterResponse) -> PartitionPlan:
    """Return the partition of the registered model.

    Raises:
        MismatchError: The servers have another partition of the same model.
    """
    model, transport = codec.model_from_proto(answer.model), connection.transport
    plan = PartitionPlan(model, len(transport.addresses))
    if answer.plan_digest != plan.digest and connection.find_servers():
        plan = PartitionPlan(plan.spec, len(transport.addresses))
    if answer.plan_digest != plan.digest:
        raise MismatchError(
            f"the servers of job {connection.membership.job} have another partition of the model: "
            "they run another version of this software. Try: one version for the whole job",
            "MODEL_MISMATCH",
        )
    return plan
