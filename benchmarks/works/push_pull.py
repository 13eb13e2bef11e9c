"""Numbers 1, 2 and 6: a large model's gradients to a server and its new weights back."""

from contextlib import ExitStack
from dataclasses import replace

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import (
    COPY,
    GLOO,
    RPC,
    RPC_TCP,
    STREAM,
    TCP,
    job,
    no_tensorflow,
    ours,
    peer,
    tensorflow,
)
from benchmarks.works.work import Lineup, Work


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    setup = Setup(scale.large)
    entries = [job(ours(lane), Setup(scale.large, lanes=lane)) for lane in LANES]
    entries += [
        job(ours(lane, "arrays"), Setup(scale.large, lanes=lane), "arrays") for lane in LANES
    ]
    entries += [
        peer(STREAM, "grpc_stream", setup),
        peer(TCP, "plain_tcp", setup),
        peer(GLOO, "gloo", replace(setup, workers=2), "reduce"),
        peer(COPY, "shared_copy", setup),
        # threads of TensorPipe poll: a core for each of its processes
        *(
            peer(name, "torch_rpc", setup, kind, spins=True)
            for name, kind in ((RPC, "best"), (RPC_TCP, "tcp"))
        ),
        *tensorflow(scale, setup, "worker"),
    ]
    return Lineup(entries, no_tensorflow(scale))


WORK = Work(
    "push_pull",
    "Gradients of a ResNet-50-like model (100 MB float32 in 160 tensors) to a server, SGD, new "
    "weights back; 1 worker, 1 server. The bare stream moves the same bytes and applies nothing; "
    "plain TCP does the same work over one connection; "
    "gloo sums the same bytes and applies nothing. torch.distributed.rpc takes shared memory on "
    "one host, unless it is told to take TCP.",
    lineup,
    quick=True,
)
