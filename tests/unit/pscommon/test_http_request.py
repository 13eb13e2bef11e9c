"""Requests to the metrics port: what is one, and which are refused."""

from base64 import b64encode

import pytest

from pscommon.telemetry.http_request import (
    Access,
    HttpRequest,
    is_loopback,
    parse_request,
    refusal,
    token_of,
)

URL = "http://127.0.0.1:9464"
LOOPBACK = Access(URL, True, None, False)
LOOPBACK_WITH_TOKENS = Access(URL, True, lambda token: token == "secret", False)
REMOTE = Access(URL, False, lambda token: token == "secret", False)
REMOTE_INSECURE_WITH_TOKENS = REMOTE._replace(is_insecure=True)
REMOTE_WITHOUT_TOKENS = REMOTE._replace(authorize=None)
REMOTE_INSECURE = REMOTE._replace(authorize=None, is_insecure=True)

LOCAL_HOST = ("Host: localhost:9464",)
OTHER_HOST = ("Host: attacker.example:9464",)
BEARER = (*OTHER_HOST, "Authorization: Bearer secret")
WRONG = (*OTHER_HOST, "Authorization: Bearer secrets")


def basic(text: str) -> str:
    return f"Authorization: Basic {b64encode(text.encode()).decode()}"


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1")


def parsed(*lines: str) -> HttpRequest:
    request = parse_request(head(*lines))
    assert request is not None
    return request


@pytest.mark.parametrize(
    ("access", "start", "lines", "status"),
    [
        # probes are open
        (LOOPBACK, "GET /livez HTTP/1.1", OTHER_HOST, None),
        (LOOPBACK, "GET /livez HTTP/1.1", (), None),
        (REMOTE, "GET /livez HTTP/1.1", OTHER_HOST, None),
        (REMOTE, "HEAD /readyz HTTP/1.1", WRONG, None),
        (REMOTE_WITHOUT_TOKENS, "GET /readyz?verbose HTTP/1.1", OTHER_HOST, None),
        (REMOTE, "POST /livez HTTP/1.1", BEARER, 405),
        # loopback: the Host header
        (LOOPBACK, "GET /metrics HTTP/1.1", LOCAL_HOST, None),
        (LOOPBACK, "GET /metrics HTTP/1.1", OTHER_HOST, 403),
        (LOOPBACK, "HEAD /metrics HTTP/1.1", OTHER_HOST, 403),
        (LOOPBACK, "GET /livezz HTTP/1.1", OTHER_HOST, 403),
        (LOOPBACK, "GET /metrics HTTP/1.1", (), 400),
        (LOOPBACK, "GET /metrics HTTP/1.0", (), None),
        (LOOPBACK, "GET /metrics HTTP/1.0", OTHER_HOST, 403),
        (LOOPBACK_WITH_TOKENS, "GET /metrics HTTP/1.1", LOCAL_HOST, None),
        (LOOPBACK_WITH_TOKENS, "GET /metrics HTTP/1.1", BEARER, 403),
        # elsewhere: the token
        (REMOTE, "GET /metrics HTTP/1.1", BEARER, None),
        (REMOTE, "GET /metrics HTTP/1.1", (*OTHER_HOST, basic("any:secret")), None),
        (REMOTE, "GET /metrics HTTP/1.1", WRONG, 401),
        (REMOTE, "GET /metrics HTTP/1.1", (*OTHER_HOST, basic("secret:any")), 401),
        (REMOTE, "GET /metrics HTTP/1.1", LOCAL_HOST, 401),
        (REMOTE, "GET /metrics HTTP/1.0", (), 401),
        (REMOTE, "GET /metrics HTTP/1.1", (), 400),
        (REMOTE, "GET /favicon.ico HTTP/1.1", OTHER_HOST, 401),
        (REMOTE_INSECURE_WITH_TOKENS, "GET /metrics HTTP/1.1", OTHER_HOST, 401),
        (REMOTE_INSECURE_WITH_TOKENS, "GET /metrics HTTP/1.1", BEARER, None),
        (REMOTE_WITHOUT_TOKENS, "GET /metrics HTTP/1.1", BEARER, 403),
        (REMOTE_INSECURE, "GET /metrics HTTP/1.1", OTHER_HOST, None),
    ],
)
def test_access(access: Access, start: str, lines: tuple[str, ...], status: int | None) -> None:
    answer = refusal(parsed(start, *lines), access)

    assert (answer.status.value if answer else None) == status


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:1",
        "127.0.0.1",
        "127.0.0.1:9464",
        "127.255.3.4:80",
        "[::1]",
        "[::1]:9464",
        "[0:0:0:0:0:0:0:1]:9464",
        "[::ffff:127.0.0.1]:9464",
    ],
)
def test_loopback_hosts(host: str) -> None:
    assert refusal(parsed("GET /metrics HTTP/1.1", f"Host: {host}"), LOOPBACK) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        ":9464",
        "localhost.attacker.example",
        "attacker.example:127",
        "127.0.0.1.attacker.example",
        "127.0.0.1@attacker.example",
        "attacker.example, localhost",
        "localhost:1:2",
        "localhost:x",
        "128.0.0.1",
        "0.0.0.0",
        "[::2]",
        "[::1",
        "::1",
        "[::1].attacker.example",
        "[::ffff:192.0.2.1]",
    ],
)
def test_other_hosts(host: str) -> None:
    """The message says how to reach the port."""
    answer = refusal(parsed("GET /metrics HTTP/1.1", f"Host: {host}"), LOOPBACK)

    assert answer is not None
    assert answer.status == 403
    assert f"Try: {URL}/metrics".encode() in answer.body


def test_a_refused_client_learns_how_to_send_the_token() -> None:
    """Browsers ask for a password only if a header of its own offers Basic."""
    answer = refusal(parsed("GET /metrics HTTP/1.1", *OTHER_HOST), REMOTE)

    assert answer is not None
    for scheme in (b"Bearer", b"Basic"):
        line = b"\r\nWWW-Authenticate: " + scheme + b' realm="paramserver"\r\n'
        assert line in answer.encode(False, False)


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer   abc", "abc"),
        ("Bearer", ""),
        ("", ""),
        ("Bearer ä", ""),
        ("Digest abc", ""),
        ("Basic " + b64encode(b"user:a:b").decode(), "a:b"),
        ("BASIC " + b64encode(b":abc").decode(), "abc"),
        ("Basic " + b64encode(b"abc").decode(), ""),
        ("Basic " + b64encode("u:ä".encode()).decode(), ""),
        ("Basic " + b64encode(b"\xff:abc").decode(), ""),
        ("Basic no base64", ""),
        ("Basic ä", ""),
    ],
)
def test_the_token_of_a_header(header: str, token: str) -> None:
    assert token_of(header) == token


HEADERS = {"host": "a", "accept": "x, y"}


def test_a_request_is_parsed() -> None:
    request = parsed("GET /metrics?name[]=a HTTP/1.1", "Host:a", "Accept: x", "ACCEPT:\t y\t")

    assert request == HttpRequest(
        "GET", "/metrics", "name[]=a", False, {"host": "a", "accept": "x, y"}
    )


@pytest.mark.parametrize(
    "lines",
    [
        ("",),
        ("GET /",),
        ("GET / HTTP/2.0",),
        ("GET / HTTP/1.2",),
        ("GET  / HTTP/1.1",),
        ("GET / HTTP/1.1 ",),
        ("G\x00T / HTTP/1.1",),
        ("GET http://127.0.0.1/metrics HTTP/1.1",),
        ("GET * HTTP/1.1",),
        ("GET /\xe4 HTTP/1.1",),
        ("GET / HTTP/1.1", "Host"),
        ("GET / HTTP/1.1", ": a"),
        ("GET / HTTP/1.1", "Host : a"),
        ("GET / HTTP/1.1", " Host: a"),
        ("GET / HTTP/1.1", "Host: a", "Host: a"),
        ("GET / HTTP/1.1", "Accept: version=1.0.0\nSet-Cookie: a"),
        ("GET / HTTP/1.1", "Accept: a\rb"),
        ("GET / HTTP/1.1", "Accept: a\x00"),
    ],
)
def test_malformed_requests(lines: tuple[str, ...]) -> None:
    assert parse_request(head(*lines)) is None


@pytest.mark.parametrize(
    ("lines", "keeps"),
    [
        (("GET / HTTP/1.1",), True),
        (("HEAD / HTTP/1.1", "Connection: keep-alive"), True),
        (("GET / HTTP/1.1", "Connection: Close"), False),
        (("GET / HTTP/1.0", "Connection: keep-alive"), False),
        (("GET / HTTP/1.1", "Content-Length: 3"), False),
        (("GET / HTTP/1.1", "Transfer-Encoding: chunked"), False),
        (("POST / HTTP/1.1",), False),
    ],
)
def test_a_connection_ends_where_the_next_request_could_be_a_body(
    lines: tuple[str, ...], keeps: bool
) -> None:
    """Otherwise a body would be read as a request."""
    assert parsed(*lines).keeps_connection == keeps


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("localhost", False),
    ],
)
def test_loopback_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected
