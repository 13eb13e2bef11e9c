"""The metrics port of a process, with the process's credentials."""

from prometheus_client import CollectorRegistry, Gauge

from pscommon.security.credentials import process_credentials
from pscommon.security.tls import Tls
from pscommon.security.tokens import role_of
from pscommon.telemetry.http import MetricsServer, Pages, Ready
from pscommon.wire.endpoint import Endpoint, listen_http


def serve_metrics(
    bind: str, registry: CollectorRegistry, ready: Ready, pages: Pages | None = None
) -> MetricsServer:
    """Serve metrics and probes on HOST:PORT; see `MetricsServer`. Raises what `listen_http` raises.

    It uses the certificates of this process, and accepts each token that this process knows: every
    role may read.
    """
    own = process_credentials()
    tokens = own.tokens
    if own.tls is not None:
        show_expiry(registry, own.tls)
    return MetricsServer(
        listen_http(Endpoint(bind)),
        registry,
        ready,
        pages=pages,
        authorize=None if tokens is None else lambda sent: role_of(tokens(), sent) is not None,
        tls=None if own.tls is None else own.tls.https_context,
        is_insecure=own.is_insecure,
    )


def show_expiry(registry: CollectorRegistry, tls: Tls) -> None:
    """Add the end of the validity of this process's certificate."""
    Gauge(
        "ps_tls_certificate_expiry_timestamp_seconds",
        "End of the validity of this process's certificate",
        registry=registry,
    ).set_function(lambda: tls.material.expires)
