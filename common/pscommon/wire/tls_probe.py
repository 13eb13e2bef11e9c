"""Why a server and this process cannot connect: gRPC does not tell what is wrong with TLS.

One handshake of our own, and one read: a TLS 1.3 server refuses a client only after the client's
part of the handshake.
"""

import socket
import ssl
import time
from contextlib import suppress

from pscommon.core.errors import AuthenticationError, PSError, UnreachableError
from pscommon.security.tls import Tls
from pscommon.security.tls_files import SERVER_NAME, TlsFiles, certificate_dates, moment
from pscommon.wire.endpoint import Endpoint

PROBE_SECONDS = 1.0
ANSWER_SECONDS = 0.5
"""Time for a server to refuse a client after the handshake, or to send its first bytes."""

REPEAT_SECONDS = 10.0

NO_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", "RECORD_LAYER_FAILURE")
"""What OpenSSL says of an answer that is not TLS, or of none."""

_DATES = {9: "is not valid yet", 10: "has expired"}
_WRONG_NAME_CODE = 62
"""Results of a verification (X509_V_ERR_ of OpenSSL's x509_vfy.h)."""

_answers: dict[str, tuple[float, AuthenticationError | None]] = {}


def cause_of(error: PSError, address: str) -> PSError:
    """Return why TLS fails, if that is the cause of a call without an answer; else the error.

    A server is asked at most once in REPEAT_SECONDS.
    """
    if not isinstance(error, UnreachableError) or error.reason != "UNREACHABLE":
        return error
    now = time.monotonic()
    asked_at, refusal = _answers.get(address, (-REPEAT_SECONDS, None))
    if now - asked_at >= REPEAT_SECONDS:
        refusal = find_refusal(Endpoint(address))
        _answers[address] = now, refusal
    return refusal or error


def find_refusal(endpoint: Endpoint) -> AuthenticationError | None:
    """Return why TLS fails with this server; None: it does not, or the server does not answer."""
    tls = endpoint.credentials.tls
    try:
        if tls is None:
            return _tls_only(endpoint) if _speaks_tls(endpoint) else None
        _shake_hands(endpoint, _own_context(tls))
    except ssl.SSLCertVerificationError as error:
        assert tls is not None
        return _bad_server(endpoint, error, tls.files)
    except ssl.SSLError as error:
        assert tls is not None
        return _refused(endpoint, error, tls.files)
    except OSError:
        return None
    return None


def _shake_hands(endpoint: Endpoint, context: ssl.SSLContext, reads: bool = True) -> bytes:
    """Shake hands as gRPC does, and return the server's certificate. Raises OSError.

    reads: Wait for what the server answers; it may refuse this process.
    """
    deadline = time.monotonic() + PROBE_SECONDS
    with socket.create_connection((endpoint.host, endpoint.port), PROBE_SECONDS) as sock:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        with context.wrap_socket(sock, server_hostname=SERVER_NAME) as secured:
            certificate = secured.getpeercert(binary_form=True) or b""
            secured.settimeout(ANSWER_SECONDS)
            with suppress(TimeoutError):
                if reads and not secured.recv(1):
                    raise ssl.SSLError("the server has closed the connection")
            return certificate


def _own_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=tls.material.ca.decode())
    context.load_cert_chain(tls.files.cert, tls.files.key)
    context.set_alpn_protocols(["h2"])
    return context


def _open_context() -> ssl.SSLContext:
    """Return a context that accepts any server and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _speaks_tls(endpoint: Endpoint) -> bool:
    try:
        _shake_hands(endpoint, _open_context())
    except ssl.SSLError as error:
        return _reason(error) not in NO_TLS
    return True


def _tls_only(endpoint: Endpoint) -> AuthenticationError:
    return _error(
        f"the server at {endpoint.address} uses TLS, and this process has no certificate. Try: "
        "`--tls-ca`, `--tls-cert` and `--tls-key` (PS_TLS_CA, PS_TLS_CERT, PS_TLS_KEY)"
    )


def _bad_server(
    endpoint: Endpoint, error: ssl.SSLCertVerificationError, files: TlsFiles
) -> AuthenticationError:
    who = f"the certificate of the server at {endpoint.address}"
    if error.verify_code in _DATES:
        begins, ends = _dates(endpoint)
        return _error(
            f"{who} {_DATES[error.verify_code]}: it is valid from {begins} to {ends}, and it is "
            f"{moment(time.time())} here. Try: a new one (`ps-ctl tls init DIR --renew`), or "
            "correct the clock"
        )
    if error.verify_code == _WRONG_NAME_CODE:
        return _error(
            f"{who} is not for servers: it lacks the DNS name {SERVER_NAME}. Try: `--tls-cert` of "
            "the server with cert.pem, not client-cert.pem"
        )
    return _error(
        f"{who} is not of the CA in {files.ca}: {error.verify_message}. Try: the CA file of this "
        "job on both sides"
    )


def _dates(endpoint: Endpoint) -> tuple[str, str]:
    """Return the beginning and the end of the validity of the server's certificate."""
    try:
        begins, ends = certificate_dates(_shake_hands(endpoint, _open_context(), reads=False))
    except (OSError, ValueError):
        return "?", "?"
    return moment(begins), moment(ends)


def _refused(endpoint: Endpoint, error: ssl.SSLError, files: TlsFiles) -> AuthenticationError:
    reason = _reason(error)
    if reason in NO_TLS:
        return _error(
            f"the server at {endpoint.address} does not use TLS, and this process does. Try: "
            "`--tls-ca`, `--tls-cert` and `--tls-key` on the server too, or on neither side"
        )
    what = reason.rpartition("ALERT_")[2].lower().replace("_", " ") or str(error.args[-1])
    return _error(
        f"the server at {endpoint.address} refuses the certificate {files.cert}: {what}. Try: a "
        "certificate of the server's CA that is valid now (compare the clocks of both machines)"
    )


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's name of an error; empty for a connection that was closed."""
    return getattr(error, "reason", None) or ""


def _error(text: str) -> AuthenticationError:
    return AuthenticationError(text, "UNAUTHENTICATED")
