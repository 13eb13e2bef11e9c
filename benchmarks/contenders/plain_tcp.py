"""Contender: a TCP connection between two processes that do the work of a step: receive the
gradients, check them for NaN and Inf, SGD, send the weights; through Python's TLS where there are
certificates. Args: SETUP [server].
"""

import math
import socket
import ssl
import struct
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.contenders.bare import bare_server
from benchmarks.contenders.exchange import check_weights
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve
from pscommon.security.tls_files import SERVER_NAME
from pscommon.system.process_limits import tune_malloc

WARM_UP_COUNT = 3
PIECE_BYTES = 1 << 20
REQUEST = struct.Struct("<Q")


def receive(sock: socket.socket, memory: memoryview) -> bool:
    """Fill the memory; return False if the peer has closed the connection."""
    position = 0
    while position < len(memory):
        part = memory[position : position + PIECE_BYTES]
        nbytes = (
            sock.recv_into(part)
            if isinstance(sock, ssl.SSLSocket)
            else sock.recv_into(part, 0, socket.MSG_WAITALL)
        )
        if not nbytes:
            return False
        position += nbytes
    return True


def secured(sock: socket.socket, setup: Setup, is_server: bool = False) -> socket.socket:
    """Return the socket, with TLS if there are certificates."""
    if not setup.tls:
        return sock
    folder = Path(setup.tls)
    kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context, prefix = ssl.SSLContext(kind), "" if is_server else "client-"
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / f"{prefix}cert.pem", folder / f"{prefix}key.pem")
    name = None if is_server else SERVER_NAME
    return context.wrap_socket(sock, server_side=is_server, server_hostname=name)


def server(setup: Setup) -> None:
    """Serve one connection until it ends."""
    gradients, weights = (torch.zeros(setup.nbytes // 4) for _ in range(2))
    memory = gradients.numpy().view(np.uint8).data
    result = weights.numpy().view(np.uint8).data
    request = bytearray(REQUEST.size)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with secured(sock, setup, is_server=True) as sock:
        while receive(sock, memoryview(request)) and receive(sock, memory):
            if not math.isfinite(gradients.sum().item()):
                raise RuntimeError("the gradients are not finite")
            weights.add_(gradients, alpha=-setup.rate)
            sock.sendall(request)
            sock.sendall(result)


def client(setup: Setup, address: str) -> None:
    """The client's life: a contender's."""
    gradients = np.ones(setup.nbytes // 4, np.float32)
    weights, updates = np.zeros_like(gradients), 0
    answer = bytearray(REQUEST.size)
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with secured(sock, setup) as sock:

        def turn() -> Measurements:
            nonlocal updates
            began = time.perf_counter()
            for _ in range(setup.pieces):
                sock.sendall(REQUEST.pack(setup.nbytes))
                sock.sendall(gradients.view(np.uint8).data)
                receive(sock, memoryview(answer))
                receive(sock, weights.view(np.uint8).data)
            seconds = (time.perf_counter() - began) / setup.pieces
            updates += setup.pieces
            check_weights(weights[[0, -1]], setup, updates)
            return {"seconds": seconds, "count": setup.pieces}

        serve({"go": turn}, WARM_UP_COUNT)


def main(setup: Setup) -> None:
    with bare_server("benchmarks.contenders.plain_tcp", setup) as (_, address):
        client(setup, address)


if __name__ == "__main__":
    tune_malloc()
    torch.set_num_threads(1)
    if sys.argv[2:] == ["server"]:
        server(Setup.from_json(sys.argv[1]))
    else:
        main(Setup.from_json(sys.argv[1]))
