"""Number 8: communication behind computation, over a slow link."""

from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from benchmarks import link
from benchmarks.rounds import Entry
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.speaker import Command, Speaker
from benchmarks.works.entrants import command
from benchmarks.works.work import Lineup, Work

COMPUTE, TRANSFER, PLAIN, OVERLAPPED = (
    "compute alone",
    "transfer alone",
    "step without overlap",
    "step with overlap",
)
FIRST_BATCH_SIZE = 256
PROBE_COUNT = 3


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    reason = link.missing()
    if reason:
        return Lineup([], dict.fromkeys((COMPUTE, TRANSFER, PLAIN, OVERLAPPED), reason))
    ends = resources.enter_context(link.SlowLink(scale.link_megabits))
    batch = balanced(Setup(scale.linked, pieces=scale.linked_steps, batch=FIRST_BATCH_SIZE), ends)
    setup = Setup(scale.linked, pieces=scale.linked_steps, batch=batch)
    overlapped = Setup(scale.linked, pieces=scale.linked_steps, batch=batch, overlap=True)
    entries = [
        Entry(COMPUTE, distant(setup, ends), "compute"),
        Entry(TRANSFER, distant(setup, ends), "transfer"),
        # a process of its own: the transfers change the weights of theirs, and this one's are
        # compared
        Entry(PLAIN, distant(setup, ends), own=PLAIN),
        Entry(OVERLAPPED, distant(overlapped, ends)),
    ]
    return Lineup(entries, {}, {"batch": float(batch)})


def balanced(setup: Setup, ends: link.SlowLink) -> int:
    """The batch size with which computing takes as long as the transfer, found in two steps; at
    least 1.
    """
    batch = setup.batch
    for _ in range(2):
        with Speaker(distant(replace(setup, batch=batch), ends)) as probe:
            probe.wait_until_ready()
            compute = median(probe.ask("compute")["seconds"] for _ in range(PROBE_COUNT))
            transfer = median(probe.ask("transfer")["seconds"] for _ in range(PROBE_COUNT))
        batch = max(1, round(batch * transfer / compute))
    return batch


def distant(setup: Setup, ends: link.SlowLink) -> Command:
    return command("distant", setup.to_json(), ends.server, ends.worker)


WORK = Work(
    "overlap",
    "Training over a link of 200 Mbit/s each way (network namespaces, veth, tbf): a perceptron of "
    "5 MB in 32 layers whose batch size makes computing take as long as the transfer; gRPC lane, "
    "1 worker, 1 server, SGD.",
    lineup,
)
