"""A job with tokens under hostile input: two shards, a standby, and an honest worker."""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc

from benchmarks.processes import memory_bytes
from pscommon.core.errors import PSError
from pscommon.security.credentials import Credentials, use_credentials
from pscommon.security.tokens import ROLES, TokenFile
from pscommon.wire import requests as rows
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import TOKEN_KEY, WORKER_KEY, AnyRequest
from pscommon.wire.status import error_from, error_of
from pscommon.wire.stream_format import HEAD_BYTES, MAGIC, FrameKind, decode_prefix
from psproto.v1 import parameter_server_pb2 as ps
from tests.support.forked_job import ForkedJob
from tests.support.hostile_requests import Sent, greeting_message
from tests.support.ports import free_ports
from tests.support.request_bases import bases
from tests.support.worker_scripts import count
from tests.support.workers import counted, counter

TOKENS = {role: f"{role}-0123456789abcdef" for role in ROLES}
FLAGS = ("--policy", "async", "--durability", "log", "--bad-gradients", "skip", "--log-format")
RATE_ONE = '[{"lr": 1.0}]'
SHARDS = 2
HONEST_RANK = 77
"""A rank that no hostile Join asks for: it would take the place of that worker."""
CALL_SECONDS = 2.0
"""Deadline of a call; only one that asks for a wait may reach it."""
PEER_SECONDS = 15.0
"""Time in which a server must end a connection whose peer has ended its side."""
REFUSED = ("INTERNAL", "UNKNOWN", "DATA_LOSS")


class Member(NamedTuple):
    """A member of the job whose key the hostile peer has."""

    worker: int
    key: bytes


class HostileJob(ForkedJob):
    """The servers as processes, the honest worker in this one."""

    def __init__(self, folder: Path) -> None:
        self.token_file = folder / "tokens"
        self.token_file.touch(0o600)
        self.token_file.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
        flags = (*FLAGS, "json", "--token-file", self.token_file)
        super().__init__(folder, SHARDS, flags, count)
        ports = [f"127.0.0.1:{port}" for port in free_ports(2 * SHARDS + 4)]
        self._standby_bind, self.names = ports[0], ("s0", "s1", "b0")
        self._monitors = dict(zip(self.names, ports[1:4], strict=True))
        self._streams = dict(zip(self.names, ports[4:7], strict=True))
        self.steps = 0
        self.bases: dict[AnyRequest, Any] = {}

    def __enter__(self) -> Self:
        use_credentials(Credentials(tokens=TokenFile(self.token_file).tokens))
        self.start_servers()
        self.honest = counter(self.address, rank=HONEST_RANK, connect_timeout=60.0)
        self.job = self.honest.job
        self.channels = [open_channel(Endpoint(self.grpc_of(name))) for name in self.names]
        self.step()
        self.path = self.describe().stream_path
        self.join()
        return self

    def __exit__(self, *args: Any) -> None:
        use_credentials(None)
        for channel in self.channels:
            channel.close()
        with suppress(PSError):
            self.honest.close()
        super().__exit__(*args)

    def start_servers(self) -> None:
        self.start(*self.names)

    def grpc_of(self, name: str) -> str:
        return self._standby_bind if name == "b0" else self._binds[int(name[1:])]

    @property
    def ports(self) -> Sequence[str]:
        """All addresses that a peer can connect to."""
        return [
            *map(self.grpc_of, self.names),
            *self._streams.values(),
            *self._monitors.values(),
            self.path,
        ]

    @property
    def tcp_ports(self) -> Sequence[str]:
        """The TCP ports of both shards."""
        of_shards = ("s0", "s1")
        found = (self.grpc_of, self._streams.__getitem__, self._monitors.__getitem__)
        return [port(name) for name in of_shards for port in found]

    @property
    def stream_addresses(self) -> Sequence[str]:
        """Of the shards."""
        return [self._streams["s0"], self._streams["s1"]]

    def _server(self, shard: int) -> list[str]:
        return [*super()._server(shard), *self._own_ports(f"s{shard}")]

    def _standby(self, shard: int) -> list[str]:
        place = ["--shard", f"0/{SHARDS}", "--bind", self._standby_bind]
        data = ["--data-dir", str(self.folder / "standby")]
        return [
            *place,
            "--standby-of",
            self._binds[0],
            *data,
            *self._flags,
            *self._own_ports("b0"),
        ]

    def _own_ports(self, name: str) -> list[str]:
        return ["--metrics-bind", self._monitors[name], "--stream-bind", self._streams[name]]

    # ---- the honest worker -----------------------------------------------------------------------

    def step(self) -> None:
        """Make a step of the honest worker, and check the weights."""
        self.push()
        self.check_weights()

    def push(self) -> None:
        gradients, _ = self.honest.model.flat_buffers()
        gradients[:] = self._ones(len(gradients))
        result = self.honest.model.exchange(gradients=gradients, weights=None, groups_json=RATE_ONE)
        assert result.status == "applied", result
        self.steps += 1

    def check_weights(self) -> None:
        """Check that each push of the honest worker counts once, and nothing else."""
        assert counted(self.honest.pull()) == self.steps

    @staticmethod
    def _ones(nbytes: int) -> bytes:
        return b"\0\0\x80?" * (nbytes // 4)

    def describe(self) -> ps.DescribeResponse:
        metadata = ((TOKEN_KEY, f"Bearer {TOKENS['read']}"),)
        raw: bytes = self.channels[0].unary_unary(rows.DESCRIBE.path)(
            b"", timeout=10, metadata=metadata
        )
        return ps.DescribeResponse.FromString(raw)

    # ---- the hostile peer ------------------------------------------------------------------------

    def join(self) -> None:
        """Join with the worker's token: `member` and `bases` are of the new member."""
        plan = self.honest.model.shards.plan
        made = bases("", plan.spec, 0, 0)
        joined = rows.JOIN.response.FromString(self._ask(rows.JOIN, made[rows.JOIN]))
        self.member = Member(joined.worker, joined.key)
        self.bases.update(bases(self.job, plan.spec, joined.worker, plan.shard_nbytes(0)))
        self._ask(rows.REGISTER, self.bases[rows.REGISTER], joined.key)

    def _ask(self, row: AnyRequest, message: Any, key: bytes = b"") -> bytes:
        metadata = [(TOKEN_KEY, f"Bearer {TOKENS['worker']}")]
        if key:
            metadata.append((WORKER_KEY, key))  # type: ignore[arg-type]
        answer: bytes = self.channels[0].unary_unary(row.path)(
            message.SerializeToString(), timeout=10, metadata=metadata
        )
        return answer

    def send(self, batch: Sequence[Sent], target: int) -> None:
        """Send all calls at once to one server, and check how each ends."""
        channel = self.channels[target]
        begun = [(sent, self._begin(channel, sent)) for sent in batch]
        for sent, call in begun:
            check(sent, outcome(call, sent.row.kind))

    def _begin(self, channel: grpc.Channel, sent: Sent) -> Any:
        options = {"timeout": CALL_SECONDS, "metadata": metadata(sent.who, self.member)}
        method = getattr(channel, sent.row.kind)(sent.row.path)
        if sent.row.kind == "unary_unary":
            return method.future(sent.frames[0], **options)
        return method(
            iter(sent.frames) if sent.row.kind == "stream_stream" else sent.frames[0], **options
        )

    def send_bytes(self, address: str, sent: bytes) -> bytes:
        """Return all that a port answers until it ends the connection."""
        is_path = address.startswith("/")
        host, _, port = address.rpartition(":")
        with socket.socket(socket.AF_UNIX if is_path else socket.AF_INET) as sock:
            sock.settimeout(PEER_SECONDS)
            sock.connect(address if is_path else (host, int(port)))
            found = bytearray()
            try:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
            except TimeoutError:
                raise
            except OSError:  # the port may be the first to end
                pass
            with suppress(ConnectionError):
                while data := sock.recv(1 << 16):
                    found += data
            return bytes(found)

    def send_stream(self, shard: int, frames: Sequence[bytes]) -> None:
        """Send frames after the greeting of a member, and check the answers."""
        hello = greeting_message(self.job, shard, *self.member, TOKENS["worker"])
        found = self.send_bytes(self.stream_addresses[shard], hello + b"".join(frames))
        for kind, message in answers(found):
            if kind is FrameKind.ERROR:
                error = error_of(message, "the server")
                text = f"{error.reason} {error} after {frames!r:.900}"
                assert error.reason not in ("INTERNAL", "ERROR", "UNKNOWN"), text

    # ---- the servers -----------------------------------------------------------------------------

    def memory_nbytes(self) -> Mapping[str, int]:
        """Resident memory of each server."""
        return {
            name: memory_bytes(self.processes[name].process.pid or 0)["now"] for name in self.names
        }

    def restart(self) -> None:
        """Kill all servers and start them again from their data directories."""
        for name in reversed(self.names):
            self.processes[name].kill()
        self.start_servers()

    def check_alive(self) -> None:
        for name in self.names:
            assert self.processes[name].exit_code is None, self.tail(name)

    def tail(self, name: str) -> str:
        return f"{name} ended: {self.processes[name].log.read_text()[-4000:]}"

    def log_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of each process and its lines."""
        for process in self.all:
            for line in process.log.read_text().splitlines():
                assert line.startswith("{"), f"{process.name}: {line}"
                yield f"{process.name}.{process.attempt}", json.loads(line)


def metadata(who: int, member: Member) -> list[tuple[str, Any]]:
    """Return the metadata of a sender: half of them are the member with its key."""
    tokens = ("", "unknown-0123456789ab", TOKENS["read"], TOKENS["worker"])
    found: list[tuple[str, Any]] = []
    if who:
        found.append((TOKEN_KEY, f"Bearer {tokens[min(who, 3)]}"))
    if who > 3:
        found.append((WORKER_KEY, member.key))
    return found


SENDERS = 8


def outcome(call: Any, kind: str) -> grpc.RpcError | None:
    """Return the failure of a call; None: it had an answer."""
    try:
        if kind == "unary_unary":
            call.result()
        else:
            for _ in call:
                pass
    except grpc.RpcError as failure:
        return failure
    return None


def check(sent: Sent, failure: grpc.RpcError | None) -> None:
    """Check that a call had an answer, or a refusal that blames the client."""
    if failure is None:
        return
    code, error = failure.code(), error_from(failure, str(sent.row))  # type: ignore[attr-defined]
    text = f"{code} {error.reason} {error} of sender {sent.who} after {sent.frames!r:.900}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        assert sent.may_wait, text
        return
    assert code.name not in REFUSED, text
    if error.reason == "UNREACHABLE":
        assert code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED), text


def answers(found: bytes) -> Iterator[tuple[FrameKind, bytes]]:
    """Yield kind and message of each complete frame after the magic bytes."""
    assert found[: len(MAGIC)] in (MAGIC, b""), found[:100]
    view = memoryview(found)[len(MAGIC) :]
    while len(view) >= HEAD_BYTES:
        prefix = decode_prefix(view)
        end = HEAD_BYTES + prefix.rest_nbytes
        message = prefix.message(bytearray(view[:HEAD_BYTES]), bytearray(view[HEAD_BYTES:end]))
        yield prefix.kind, message
        view = view[end + prefix.data_nbytes :]
