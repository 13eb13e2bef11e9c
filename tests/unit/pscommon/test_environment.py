"""Unknown environment variables are reported; those of others are ignored."""

import pytest

from pscommon.settings import options
from pscommon.settings.environment import unread

SERVICE = {
    "PS_SERVICE_HOST": "10.0.0.1",
    "PS_SERVICE_PORT": "50051",
    "PS_SERVICE_PORT_GRPC": "50051",
    "PS_PORT": "tcp://10.0.0.1:50051",
    "PS_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    "PS_PORT_50051_TCP_PROTO": "tcp",
    "PS_PORT_50051_TCP_PORT": "50051",
    "PS_PORT_50051_TCP_ADDR": "10.0.0.1",
    "PS_SERVER_0_SERVICE_HOST": "10.0.0.1",
    "PS_SERVER_0_PORT": "tcp://10.0.0.1:50051",
}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("PS_MIN_WORKER", "no setting is called PS_MIN_WORKER; did you mean PS_MIN_WORKERS?"),
        ("PS_DATADIR", "no setting is called PS_DATADIR; did you mean PS_DATA_DIR?"),
        ("PS_OUTPT", "no setting is called PS_OUTPT; did you mean PS_OUTPUT?"),
        ("PS_MODEL_FOO", "no setting is called PS_MODEL_FOO"),
    ],
)
def test_unknown_variables_are_reported(name: str, sentence: str) -> None:
    assert list(unread({name: "3", "HOME": "/", "PSModulePath": "x"})) == [sentence]


def test_a_port_variable_without_a_service_is_reported() -> None:
    assert [text.partition(";")[0] for text in unread({"PS_PORT": "50051"})] == [
        "no setting is called PS_PORT"
    ]


def test_every_setting_is_known() -> None:
    known = {
        variable
        for table in options.TABLES.values()
        for option in table
        for variable in option.variables
    }

    assert not list(
        unread(dict.fromkeys([*known, "PS_CONFIG", "PS_LOCAL", "PS_OUTPUT", "PS_TIMEOUT"], ""))
    )


def test_services_of_kubernetes_are_not_reported() -> None:
    assert not list(unread(SERVICE))
    assert (
        not {variable for option in options.SERVER for variable in option.variables}
        & SERVICE.keys()
    )
