"""The contenders by name, and how each is started. Bars and plots call them by these names."""

from benchmarks.rounds import Entry
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.speaker import Command

STREAM = "bare gRPC stream"
CALL = "bare gRPC call"
EMPTY_CALL = "bare gRPC call, empty"
ALL_REDUCE = "gloo all_reduce"
GLOO = "gloo all_reduce, 2 processes"
GLOO_ADAM = "gloo all_reduce + fused Adam, 2 processes"
DDP = "DistributedDataParallel, gloo"
DDP_PLAIN = "DistributedDataParallel, gloo, Adam not fused"
COPY = "memcpy + SGD + memcpy, 2 processes"
TCP = "plain TCP"
TLS = "plain TLS"
RPC = "torch.distributed.rpc"
RPC_TCP = "torch.distributed.rpc, TCP"
TENSORFLOW = "TensorFlow ParameterServerStrategy"


def ours(lane: str, what: str = "") -> str:
    """Our name in the results: "paramserver, shm, arrays"."""
    return f"paramserver, {lane}" + (f", {what}" if what else "")


def team(lane: str, workers: int) -> str:
    """Our name where the number of workers matters."""
    return with_workers(ours(lane), workers)


def with_workers(name: str, workers: int) -> str:
    """Return the name of an entry with its number of workers."""
    return f"{name}, {workers} worker" + "s" * (workers > 1)


def job(name: str, setup: Setup, kind: str = "exchange") -> Entry:
    """A job of ours; kind: which of benchmarks.contenders its workers are."""
    return Entry(name, command("paramserver", kind, setup.to_json()))


def peer(
    name: str, module: str, setup: Setup, *kind: str, word: str = "go", spins: bool = False
) -> Entry:
    return Entry(name, command(module, *kind, setup.to_json()), word, spins=spins)


def tensorflow(scale: Scale, setup: Setup, word: str) -> list[Entry]:
    """Return no entry without TensorFlow; see `no_tensorflow`."""
    if not scale.tensorflow:
        return []
    module = "benchmarks.contenders.tensorflow_ps"
    return [Entry(TENSORFLOW, Command(module, (setup.to_json(),), python=scale.tensorflow), word)]


def no_tensorflow(scale: Scale) -> dict[str, str]:
    return {} if scale.tensorflow else {TENSORFLOW: scale.no_tensorflow}


def command(module: str, *args: str) -> Command:
    return Command(f"benchmarks.contenders.{module}", args)
