"""A request to the metrics port: its text, its answer, and which requests are refused."""

import re
from base64 import b64decode
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

METHODS = ("GET", "HEAD")
OPEN_PATHS = ("/livez", "/readyz")
"""The kubelet and the health check of an image have no token, and name any host."""

PAGE_LINES = (
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options: nosniff",
    "Referrer-Policy: no-referrer",
    "Cache-Control: no-store",
)

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_START = re.compile(rf"({_TOKEN.pattern}) ([!-~]+) HTTP/1\.([01])")
_CONTROL = re.compile(r"[\x00-\x08\n-\x1f\x7f]")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]+))(?::[0-9]*)?", re.IGNORECASE)


class HttpRequest(NamedTuple):
    """The head of a request.

    Attributes:
        path: The target without its query.
        is_1_0: HTTP/1.0, otherwise HTTP/1.1.
        headers: Values by name in lower case; those of a repeated name are joined by commas.
    """

    method: str
    path: str
    query: str
    is_1_0: bool
    headers: Mapping[str, str]

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow. A body is never read."""
        has_body = self.headers.keys() & {"content-length", "transfer-encoding"}
        is_last = "close" in self.headers.get("connection", "").lower()
        return self.method in METHODS and not (self.is_1_0 or has_body or is_last)


class Answer(NamedTuple):
    """A status, the body, and lines of the head that belong to them."""

    status: HTTPStatus
    body: bytes
    lines: tuple[str, ...] = ()

    def encode(self, is_head: bool, keeps_connection: bool) -> bytes:
        """Return the bytes to send; without the body if `is_head`."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Length: {len(self.body)}",
            f"Connection: {'keep-alive' if keeps_connection else 'close'}",
            *self.lines,
        )
        return "".join(f"{line}\r\n" for line in (*head, "")).encode("latin-1") + (
            b"" if is_head else self.body
        )


class Access(NamedTuple):
    """What the port demands.

    Attributes:
        url: Where the port listens.
        is_loopback: Whether only this machine reaches it.
        authorize: Returns whether a token permits to read; None: there are no tokens.
        is_insecure: Whether everyone may read if there are no tokens.
    """

    url: str
    is_loopback: bool
    authorize: Callable[[str], bool] | None
    is_insecure: bool


def text_answer(status: HTTPStatus, text: str, *lines: str) -> Answer:
    """Return an answer with one line of text."""
    body = (" ".join(text.split()) + "\n").encode()
    return Answer(status, body, ("Content-Type: text/plain; charset=utf-8", *lines))


def page_answer(kind: str, body: bytes) -> Answer:
    """Return a page for browsers, or a part of one. It may load and ask only this port.

    kind: its Content-Type.
    """
    return Answer(HTTPStatus.OK, body, (f"Content-Type: {kind}", *PAGE_LINES))


def parse_request(head: bytes) -> HttpRequest | None:
    """Return the request; None: it is not of HTTP/1.

    head: The request up to and including the empty line.
    """
    start, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    found = _START.fullmatch(start)
    if found is None or any(map(_CONTROL.search, lines)):
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or (name == "host" and name in headers):
            return None
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    method, target, minor = found.groups()
    path, _, query = target.partition("?")
    if method in METHODS and not path.startswith("/"):
        return None
    return HttpRequest(method, path, query, minor == "0", headers)


def refusal(request: HttpRequest, access: Access) -> Answer | None:
    """Return the answer that refuses a request; None: it is permitted.

    On loopback the Host header protects from DNS rebinding: a page in a browser of this machine can
    give its own name the address 127.0.0.1, but it cannot send another Host.
    """
    if request.method not in METHODS:
        allowed = ", ".join(METHODS)
        return text_answer(
            HTTPStatus.METHOD_NOT_ALLOWED, f"this port answers {allowed}", f"Allow: {allowed}"
        )
    if request.path in OPEN_PATHS:
        return None
    host = request.headers.get("host")
    if host is None and not request.is_1_0:
        return text_answer(HTTPStatus.BAD_REQUEST, "the request has no Host header")
    if access.is_loopback:
        if host is None or _names_loopback(host):
            return None
        return text_answer(
            HTTPStatus.FORBIDDEN,
            "request refused: its Host header does not name this machine's loopback address. "
            f"Try: {access.url}/metrics",
        )
    if access.authorize is None:
        if access.is_insecure:
            return None
        return text_answer(
            HTTPStatus.FORBIDDEN,
            "request refused: it needs a token, and this process knows none. Try: start it with "
            "`--token-file`, or with `--insecure`",
        )
    token = token_of(request.headers.get("authorization", ""))
    if token and access.authorize(token):
        return None
    return text_answer(
        HTTPStatus.UNAUTHORIZED,
        "request refused: its token is missing or wrong. Try: `Authorization: Bearer TOKEN` with a "
        "read token, or Basic with the token as password",
        # two lines: Chromium reads only the first challenge of a line, and asks only for Basic
        'WWW-Authenticate: Bearer realm="paramserver"',
        'WWW-Authenticate: Basic realm="paramserver"',
    )


def token_of(authorization: str) -> str:
    """Return the token in a header, Bearer or Basic; empty: none. Tokens are ASCII."""
    scheme, _, value = authorization.partition(" ")
    token, value = "", value.strip()
    if scheme.lower() == "bearer":
        token = value
    elif scheme.lower() == "basic":
        try:
            token = b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return token if token.isascii() else ""


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address; False for a name."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def _names_loopback(host: str) -> bool:
    found = _HOST.fullmatch(host)
    name = (found[1] or found[2]).lower() if found is not None else ""
    return name == "localhost" or is_loopback(name)
