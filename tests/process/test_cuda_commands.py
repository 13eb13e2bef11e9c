"""Commands on a GPU: groups of ranks, and `ps-ctl suggest batch`.

A machine with one GPU has NCCL groups of one rank; two ranks that share it use gloo.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.programs import Program, Programs, programs_in

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU on this machine"
    ),
    pytest.mark.timeout(300),
]

# float64: sums of a GPU differ from those of a CPU in the last bits only
SCRIPT = """
import os, torch, psworker
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
layers = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
rows = torch.rand(96, 6)
data = rows, (3 * rows.mean(1)).long()
with psworker.connect() as job:
    model = nn.Sequential(*layers).to(job.device, torch.float64)
    wrapped = nn.parallel.DistributedDataParallel(model) if "DDP" in os.environ else model
    if "FSDP2" in os.environ:
        mesh = dist.device_mesh.init_device_mesh(job.device.type, (dist.get_world_size(),))
        dist.fsdp.fully_shard(model[0], mesh=mesh)
        dist.fsdp.fully_shard(model, mesh=mesh)
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), wrapped)
    for x, y in job.batches(data, batch_size=8, epochs=3, seed=3):
        F.cross_entropy(wrapped(x.to(job.device, torch.float64)), y.to(job.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("process group", dist.get_backend_config(), "on", job.device.type)
    if job.is_first:
        job.save("end.safetensors")
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def one_rank(programs: Programs, device: str, kind: str) -> Program:
    """Run a group of one rank without servers."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "PS_GROUP": 1}
    return programs.run("python", "train.py", PS_LOCAL=1, PS_DEVICE=device, **place, **{kind: 1})


def two_groups(programs: Programs, device: str, kind: str) -> Program:
    """Run two workers with two ranks each."""
    flags = ("--servers", 2, "--workers", 2, "--group-size", 2, "--device", device)
    return programs.run("ps-run", *flags, "train.py", **{kind: 1})


def sizes(programs: Programs, run: Program) -> dict[str, float]:
    """Return the norms of the model's tensors at the end."""
    assert run.wait(200) == 0, run.output
    assert "memory_not_pinned" not in run.output
    weights = load_file(programs.folder / "end.safetensors")
    return {name: value.double().norm().item() for name, value in weights.items()}


GROUPS = [
    pytest.param(group, kind, id=f"{name}, {kind}")
    for group, name in ((one_rank, "one rank"), (two_groups, "two groups of two"))
    for kind in ("plain", "DDP", "FSDP2")
    if group is one_rank or kind != "FSDP2"  # gloo lacks what FSDP2 needs on a GPU
]


@pytest.mark.parametrize(("group", "kind"), GROUPS)
def test_groups_on_a_gpu_train_as_those_on_the_cpu(
    programs: Programs, group: Callable[[Programs, str, str], Program], kind: str
) -> None:
    expected = sizes(programs, group(programs, "cpu", kind))

    run = group(programs, "cuda", kind)

    ranks = 1 if group is one_rank else 2
    has_nccl = ranks <= torch.cuda.device_count()
    assert ("cuda:nccl on cuda" in run.output, "on cpu" in run.output) == (has_nccl, False)
    assert sizes(programs, run) == pytest.approx(expected, rel=1e-6)


SUGGESTED = """
import psworker, torch
from torch import nn

data = torch.ones(4096, 1)
torch.cuda.set_per_process_memory_fraction(2e9 / torch.cuda.mem_get_info()[1])
with psworker.connect() as job:
    model = nn.Linear(1, 1, device=job.device)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.125), model)
    for batch in job.batches(data, batch_size=512):
        kept = None
        kept = torch.empty(len(batch) << 20, dtype=torch.uint8, device=job.device)
        model(batch.to(job.device)).sum().backward()
        optimizer.step()
"""


def test_suggest_batch_ends_where_the_memory_of_the_gpu_does(programs: Programs) -> None:
    """A row takes 1 MiB of the 1.9 GiB that the script allows itself."""
    programs.script(SUGGESTED, "suggested.py")
    line = ("suggest", "batch", "--steps", 2, "--output", "json", "suggested.py")

    program = programs.run("ps-ctl", *line, PS_DEVICE="cuda")

    assert program.process.returncode == 0, program.output
    found = json.loads(program.out)
    tries = {each["batch_size"]: each for each in found["tries"]}
    assert 512 << 20 <= tries[512]["gpu_memory"] < 600 << 20, found
    assert max(tries) <= 2048
    assert "memory" in found["ended"], found
