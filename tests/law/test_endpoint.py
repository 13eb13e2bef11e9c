"""One module opens all connections and all listening sockets."""

import pytest

from tests.support.sources import Source, packages, parse

HOME = "pscommon.wire.endpoint"
OPENS = {
    "add_insecure_port",
    "add_secure_port",
    "connect_ex",
    "create_connection",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "insecure_channel",
    "open_connection",
    "open_unix_connection",
    "secure_channel",
    "sock_accept",
    "sock_connect",
    "socketpair",
    "start_server",
    "start_unix_server",
    "wrap_socket",
}
OF_SOCKETS = {"accept", "bind", "connect", "listen"}
"""Methods of sockets; in modules without sockets they are something else."""

SOCKETS = {"socket", "asyncio", "ssl", "selectors"}
CLIENTS = {
    "aiohttp",
    "ftplib",
    "http.client",
    "httpx",
    "requests",
    "smtplib",
    "socketserver",
    "telnetlib",
    "urllib.request",
    "urllib3",
    "wsgiref",
    "xmlrpc",
}
SERVERS = {"http.server"}
ALLOWED = {
    # it only asks whether a cluster is there
    "psworker.run.ray_engine": {"socket.create_connection"},
    # the metrics server gets a listening socket and contexts
    "pscommon.telemetry.http": {"self._listening.accept"},
    "pscommon.telemetry.http_connection": {"context.wrap_socket"},
    # Unix sockets between the processes of one worker, which check each other's user
    "psworker.group.link": {
        "listening.accept",
        "listening.bind",
        "listening.listen",
        "sock.connect",
    },
    "psworker.group.process_group": {"socket.create_server"},  # finds a free port for torch
    "psworker.steps.process_groups": {"socket.create_server"},  # torch's store would listen on all
    # a datagram socket without a datagram finds the address of this host
    "psworker.exchange.reduce_client": {"probe.connect"},
    # plain HTTP to the metadata server of this machine, without a token of the job
    "psworker.session.preemption": {"http.client"},
    # it finds out why a connection fails, and needs contexts that no connection may use
    "pscommon.wire.tls_probe": {"context.wrap_socket", "socket.create_connection"},
}


def openings(source: Source) -> set[str]:
    """Return what opens a connection or a port without the module that does."""
    imported = {name for name, _ in source.imports()}
    libraries = imported & (CLIENTS | SERVERS)
    names = OPENS | (OF_SOCKETS if imported & SOCKETS else set())
    calls = {
        name
        for name in source.called()
        if name.rpartition(".")[2] in names and not name.startswith(HOME + ".")
    }
    return (libraries | calls) - ALLOWED.get(source.module, set())


def test_one_module_opens_connections_and_ports() -> None:
    """So credentials are a change in one file."""
    found = [
        f"{source.path}: {sorted(names)}"
        for source in packages()
        if source.module != HOME and (names := openings(source))
    ]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import grpc\ngrpc.insecure_channel('host:1')",
        "from grpc.aio import insecure_channel\ninsecure_channel('host:1')",
        "def f(server):\n    server.add_insecure_port('host:1')",
        "import socket\nsocket.create_connection(('host', 1))",
        "from socket import socket\nsock = socket()\nsock.bind(('', 1))",
        "import socket\ndef f(sock: socket.socket):\n    sock.listen()",
        "import socket\ndef f(sock: socket.socket):\n    sock.connect(('host', 1))",
        "import asyncio\nasync def f():\n    await asyncio.start_server(f)",
        "from asyncio import open_connection\nopen_connection('host', 1)",
        "from http.server import HTTPServer\nHTTPServer(('', 1), None)",
        "import urllib.request",
    ],
)
def test_the_law_finds(text: str) -> None:
    """One occurrence in each."""
    assert openings(parse(text))


def test_the_law_allows() -> None:
    """The module's functions, and methods that share only a name."""
    assert not openings(
        parse(
            "import socket\nfrom pscommon.wire.endpoint import accept, listen\n"
            "accept(listen(endpoint)).close()\nsocket.gethostname()"
        )
    )
    assert not openings(parse("import psworker\npsworker.connect()"))
