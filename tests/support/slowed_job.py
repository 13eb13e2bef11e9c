"""A job of two shards in which one place takes DELAY_SECONDS longer in each step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.process_job import MODULES, wait_for_version
from tests.support.programs import Program, Programs
from tests.support.proxy import Proxy, advertised

DELAY_SECONDS = 0.05
FIRST_VERSION = 20
"""Updates before a recording: until then processes import and allocate."""

DELAYED_SERVER = Path(__file__).with_name("delayed_server.py")

SCRIPT = """import os, threading
import torch
import psworker

def take(place):
    if os.environ.get("SLOW_PLACE") == place:
        threading.Event().wait(float(os.environ["SLOW_SECONDS"]))

def collate(samples):
    take("data")
    return torch.stack(samples)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 10))
job = psworker.connect()
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
data = [torch.randn(100) for _ in range(512)]
for batch in job.batches(data, batch_size=8, epochs=10_000, collate_fn=collate):
    optimizer.zero_grad()
    take("compute")
    model(batch).square().mean().backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Place:
    """Where a job is slow.

    Attributes:
        name: The place: data, compute, link, apply, log, standby, answer, decision or shards.
        number: The worker's rank or the shard that is slow; of link, the shard at the other end.
        phase: What `ps-ctl why` calls it.
        who: What `ps-ctl why` blames, with {worker} for the number of the worker of rank `number`.
    """

    name: str
    number: int
    phase: str
    who: str


PLACES = tuple(
    Place(name, number, phase, who.format(number=number, worker="{worker}"))
    for name, phase, who, numbers in (
        ("data", "data", "worker {worker}", (0, 1)),
        ("compute", "compute", "worker {worker}", (0, 1)),
        ("link", "link", "link of worker {worker} and shard {number}", (0, 1)),
        ("apply", "apply", "shard {number}", (0, 1)),
        ("log", "log", "log of shard {number}", (0, 1)),
        ("standby", "standby", "standby of shard {number}", (0, 1)),
        ("answer", "send", "shard {number}", (0, 1)),
        ("decision", "decide", "coordinator", (0,)),
        ("shards", "link", "link of shard {number} and shard 0", (1,)),
    )
    for number in numbers
)

IN_A_SERVER = ("apply", "log", "standby", "answer", "decision")


@contextmanager
def slowed_job(
    programs: Programs, place: Place, policy: str, lane: str, seconds: float = DELAY_SECONDS
) -> Iterator[str]:
    """Start the job, and yield shard 0's address once it trains.

    A link between a worker and a shard is slow in a job of one worker: all workers of a job reach
    a shard at the address that it advertises.
    """
    ports = free_ports(6)
    binds, streams = ([f"127.0.0.1:{port}" for port in each] for each in (ports[:2], ports[2:4]))
    with ExitStack() as stack:

        def slow_proxy(target: str) -> Proxy:
            proxy = stack.enter_context(Proxy(target))
            proxy.latency(seconds / 2)
            return proxy

        def server(shard: int, *flags: object, is_slow: bool) -> Program:
            arguments = ("--shard", f"{shard}/2", "--lanes", lane, *flags)
            if not is_slow:
                return programs.fork("ps-server", *arguments, PYTHONPATH=MODULES)
            delayed = (DELAYED_SERVER, place.name, seconds)
            return programs.fork("python", *delayed, *arguments, PYTHONPATH=MODULES)

        addresses, join = list(binds), binds[0]
        if place.name == "shards":
            join = slow_proxy(binds[0]).address
        started = []
        for shard, bind in enumerate(binds):
            is_here = shard == place.number
            flags: list[object] = ["--bind", bind, "--policy", policy]
            flags += ["--join", join] if shard else []
            flags += ["--staleness", 2] if policy == "ssp" else []
            if place.name == "link" and is_here:
                proxy, stream = slow_proxy(bind), slow_proxy(streams[shard])
                addresses[shard] = proxy.address
                flags += advertised(proxy, streams[shard], stream)
            if place.name == "log":
                folder = programs.folder / f"data-{shard}"
                flags += ["--durability", "log", "--data-dir", folder]
            in_primary = place.name in IN_A_SERVER and place.name != "standby"
            started.append(server(shard, *flags, is_slow=in_primary and is_here))
            started[-1].wait_for("listening")
            if place.name == "standby" and is_here:
                own = ("--bind", f"127.0.0.1:{ports[4]}", "--standby-of", bind)
                server(shard, *own, is_slow=True)
                started[-1].wait_for("standby_in_sync")
        for rank in range(1 if place.name == "link" else 2):
            slow = place.name if place.name in ("data", "compute") and rank == place.number else ""
            programs.fork(
                "ps-worker",
                *("--ps", ",".join(addresses), "--worker-rank", rank, "--device", "cpu"),
                programs.script(SCRIPT),
                PYTHONPATH=MODULES,
                PS_LANES=lane,
                SLOW_PLACE=slow,
                SLOW_SECONDS=seconds,
            )
        wait_for_version(addresses[0], FIRST_VERSION)
        yield addresses[0]
