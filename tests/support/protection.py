"""Certificates and tokens of `make test-tls`, for the processes that tests start.

The environment of the suite names the files of a server; the others lie beside them. In any other
run it names none, and all of this has no effect.
"""

import os
import ssl

from pscommon.security.credentials import use_environment
from psworker.session.arguments import security_of

SERVER = ("cert.pem", "key.pem", "tokens")
WORKER = ("client-cert.pem", "client-key.pem", "worker.token")
ADMIN = ("client-cert.pem", "client-key.pem", "admin.token")


def protection_of(command: str) -> dict[str, str]:
    """Return the variables for ps-server, ps-ctl, or a worker with any other command."""
    security = security_of(os.environ)
    if security.tls is None:
        return {}
    files = {"ps-server": SERVER, "ps-ctl": ADMIN}.get(command, WORKER)
    folder = security.tls.ca.parent
    names = ("PS_TLS_CERT", "PS_TLS_KEY", "PS_TOKEN_FILE")
    paths = {name: str(folder / file) for name, file in zip(names, files, strict=True)}
    return {"PS_TLS_CA": str(security.tls.ca), **paths}


def protect_this_process() -> None:
    """Let servers and clients in the process of the test use the files too."""
    use_environment(security_of(os.environ))


def https_context() -> ssl.SSLContext | None:
    """Return what a client of a metrics port needs; None: it speaks HTTP."""
    security = security_of(os.environ)
    if security.tls is None:
        return None
    context = ssl.create_default_context(cafile=security.tls.ca)
    context.check_hostname = False  # the certificates have no name for 127.0.0.1
    return context
