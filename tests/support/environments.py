"""Detection in tests: an environment as an engine gives it, and the place found there."""

import json
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.environments.detection import FLAGS, detect
from pscommon.environments.place import Place, Role, Surroundings

SERVERS = ["job-ps-0.default.svc:2222", "job-ps-1.default.svc:2222"]
CHIEF = ["job-chief-0.default.svc:2222"]
WORKERS = ["job-worker-0.default.svc:2222", "job-worker-1.default.svc:2222"]


def detected(role: Role, host_name: str = "host", **environ: str) -> Place | None:
    return detect(Surroundings(environ, host_name), role, FLAGS[role])


def found(role: Role, host_name: str = "host", **environ: str) -> Place:
    place = detected(role, host_name, **environ)
    assert place is not None
    return place


def config(kind: object, index: object, **cluster: Any) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def reason(role: Role, **environ: str) -> str:
    with pytest.raises(InvalidRequestError) as error:
        detected(role, **environ)
    assert error.value.exit_code == 2
    assert ". Try: " in str(error.value)
    return str(error.value)
