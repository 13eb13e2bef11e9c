"""Scripts that train models which are spread over the ranks of one group, without servers."""

import sys

from tests.support.ports import free_port
from tests.support.programs import Programs

COMMON = """
import os, warnings, torch, psworker
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
)
from pscommon.core.errors import InvalidRequestError

warnings.simplefilter("ignore")
rows = torch.randn(251, 5, generator=torch.Generator().manual_seed(5))
data = rows, rows.sum(1, keepdim=True)
loss_of = nn.functional.mse_loss

def refused(words, act):
    try:
        act()
    except InvalidRequestError as error:
        assert words in str(error), error
        print("ok refused:", words, flush=True)
    else:
        raise AssertionError(words)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (5, WIDTH, 6, 1)
        pairs = zip(sizes, sizes[1:])
        self.layers = nn.ModuleDict({str(n): nn.Linear(*pair) for n, pair in enumerate(pairs)})
        self.norm = nn.LayerNorm(sizes[-2])
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                draw = torch.Generator().manual_seed(number)
                parameter.copy_(torch.rand(parameter.shape, generator=draw) - 0.4)
    def forward(self, x):
        for name, layer in self.layers.items():
            if name == str(2):
                x = self.norm(x)
            x = layer(x) if name == str(2) else torch.tanh(layer(x))
        return x

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)

def reference(make, batch_size, clip=None, size=251):
    # rows in the order of job.batches(shuffle=False)
    model = Net()
    optimizer = make(model.parameters())
    for x, y in zip(data[0][:size].split(batch_size), data[1][:size].split(batch_size)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()

def check(name, found, expected, tolerance):
    assert found.keys() == expected.keys(), (name, found.keys(), expected.keys())
    for key, value in expected.items():
        off = float((found[key] - value).abs().max() / value.abs().max())
        assert off <= tolerance, (name, key, off)
    print("ok", name, flush=True)

def saved(job):
    # by the last rank, which is not the worker
    if dist.get_rank() == dist.get_world_size() - 1:
        job.save("end.safetensors")
    job.barrier()
    from safetensors.torch import load_file
    return load_file("end.safetensors")
"""


def run_ranks(programs: Programs, size: int, script: str, width: int) -> str:
    """Run a script on the ranks of one group without servers; return what the last one wrote."""
    programs.script(f"WIDTH = {width}\n{COMMON}{script}")
    variables = {"PS_LOCAL": 1, "PS_GROUP": 1, "WORLD_SIZE": size, "MASTER_PORT": free_port()}
    ranks = [
        programs.start(sys.executable, "train.py", RANK=rank, OMP_NUM_THREADS=1, **variables)
        for rank in range(size)
    ]
    for rank in ranks:
        assert rank.wait(240) == 0, "".join(each.output for each in ranks)
    return ranks[-1].out
