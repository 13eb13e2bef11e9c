"""Models that are spread over the processes of a group, against the same training in one process.

One start of the processes runs many trainings, each a job without servers.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.programs import Programs, programs_in
from tests.support.spread import run_ranks

FSDP = """
def sharded(kind="nested", precision=None):
    model, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    keys = {"mesh": mesh}
    if precision:
        keys["mp_policy"] = precision
    if kind in ("True", "False"):
        keys["reshard_after_forward"] = kind == "True"
    for layer in model.layers.values():
        fully_shard(layer, **keys)
    return model if kind == "part" else fully_shard(model, **keys)

def train(job, model, optimizer, batch_size=12, evaluates=False):
    for x, y in job.batches(data, batch_size, shuffle=False):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if evaluates:  # torch keeps the weights that a forward without backward has gathered
            with torch.no_grad():
                model(x)
        optimizer.step()

# 251 rows: the last batch has 85, and in batches of 50 it has one, which is not rank 0's
for kind in ("nested", "True", "False", "part"):
    for make, tolerance in ((sgd, 1e-6), (adam, 1e-5)):
        with psworker.connect() as job:
            model = sharded(kind)
            optimizer = job.optimizer(make(model.parameters()), model)
            train(job, model, optimizer, 83)
            check(f"{kind} {make.__name__}", saved(job), reference(make, 166), tolerance)
            held = {name: p.full_tensor() if kind != "part" or "layers" in name else p
                    for name, p in model.named_parameters()}
            check("model", {n: p.detach() for n, p in held.items()}, saved(job), 0)

with psworker.connect() as job:
    model = sharded()
    optimizer = job.optimizer(sgd(model.parameters()), model, clip_norm=0.3)
    train(job, model, optimizer)
    check("clip_norm", saved(job), reference(sgd, 24, clip=0.3), 2e-6)

with psworker.connect() as job:
    model = sharded("False")
    optimizer = job.optimizer(sgd(model.parameters()), model)
    train(job, model, optimizer, 25, evaluates=True)
    check("evaluation", saved(job), reference(sgd, 50), 2e-6)

with psworker.connect() as job:  # as torch alone does it
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, alone = sharded(precision=precision), sharded(precision=precision)
    optimizer, own = job.optimizer(sgd(model.parameters()), model), sgd(alone.parameters())
    for x, y in job.batches(data, 12, shuffle=False, drop_last=True):
        for net, each in ((model, optimizer), (alone, own)):
            each.zero_grad()
            loss_of(net(x), y.bfloat16()).backward()
            each.step()
    expected = {name: p.full_tensor().detach() for name, p in alone.named_parameters()}
    check("mixed precision", saved(job), expected, 1e-6)

with psworker.connect() as job:  # gradients of two batches are reduced together
    model = sharded()
    optimizer = job.optimizer(sgd(model.parameters()), model)
    for number, (x, y) in enumerate(job.batches(data, 12, shuffle=False, drop_last=True)):
        model.set_requires_gradient_sync(number % 2 == 1)
        (loss_of(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert job.stats.samples == 10 * 12, job.stats.samples
    check("accumulation", saved(job), reference(sgd, 48, size=240), 2e-6)

with psworker.connect() as job:
    model = sharded()
    optimizer = job.optimizer(sgd(model.parameters()), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    versions = []
    for number, (x, y) in enumerate(job.batches(data, 24, shuffle=False)):
        if number == 2 and dist.get_rank():
            y = y * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        versions.append(job.version)
    assert versions[1:4] == [2, 2, 3], versions
    print("ok scaler", flush=True)

with psworker.connect() as job:
    first, second = sharded(), sharded()
    a = job.optimizer(sgd(first.parameters()), first, name="a")
    b = job.optimizer(adam(second.parameters()), second, name="b")
    for x, y in job.batches(data, 12, shuffle=False):
        for model, optimizer in ((first, a), (second, b)):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    found = saved(job)
    for name, make in (("a", sgd), ("b", adam)):
        own = {key[2:]: value for key, value in found.items() if key.startswith(name + ".")}
        check(f"optimizer {name}", own, reference(make, 24), 1e-5)

class OwnReduction:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)

with psworker.connect() as job:
    model = Net()
    early = sgd(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    refused("make the optimizer after", lambda: job.optimizer(early, model))
    from torch.distributed.fsdp import FullyShardedDataParallel
    old = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    refused("fully_shard (FSDP2)", lambda: job.optimizer(sgd(old.parameters()), old))
    optimizer = job.optimizer(sgd(model.parameters()), model)
    loss_of(model(rows), data[1]).backward()
    refused("step(samples=...) comes too late", lambda: optimizer.step(samples=3))
    optimizer.step()

with psworker.connect() as job:  # the last batch is uneven
    model = sharded()
    model.layers["1"].set_custom_reduce_scatter(OwnReduction())
    optimizer = job.optimizer(sgd(model.parameters()), model)
    refused("drop_last=True", lambda: train(job, model, optimizer))
    assert job.version == 10

def anonymous_bytes():
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

with psworker.connect() as job:  # what job.optimizer and steps add to what torch needs
    layers, whole = 24, 24 * (4 << 20)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    meta = torch.optim.SGD(model.parameters(), lr=0.1)
    refused("to_empty", lambda: job.optimizer(meta, model))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.01)
    grown = -anonymous_bytes()
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    grown += anonymous_bytes()
    for _ in range(2):
        model(torch.ones(1, 1024)).sum().backward()
        grown -= anonymous_bytes()
        optimizer.step()
        grown += anonymous_bytes()
        optimizer.zero_grad()
    held = sum(p.to_local().nbytes for p in model.parameters())
    if dist.get_rank():  # rank 0 has the weights of a job without servers
        assert held + grown < 0.6 * whole, (held, grown, whole)
        print("ok memory", (held + grown) / whole, flush=True)
"""


MESHES = """
plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
inputs = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
sequences = {  # gradients of the norm are sums that torch has not added up
    "layers.0": ColwiseParallel(),
    "layers.1": RowwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0),
    "layers.2": PrepareModuleInput(use_local_output=True, **inputs),
}

def stage_of(model, stage, **keys):
    for name in list(model.layers):
        if (name == "0") == (stage > 0):
            del model.layers[name]
    if not stage:
        del model.norm
    return PipelineStage(model, stage, 2, torch.device("cpu"), **keys)

for kind in ("2d", "tensor x data", "pipeline x data", "pipeline x fsdp", "hsdp"):
    with psworker.connect() as job:
        names = {"p": ("pp", "dp"), "h": ("replicas", "shards")}.get(kind[0], ("dp", "tp"))
        mesh, schedule = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), None
        model = target = Net()
        if kind in ("2d", "tensor x data"):
            parallelize_module(model, mesh["tp"], plan if kind == "2d" else sequences)
        if kind.startswith("pipeline"):
            target = stage_of(model, mesh["pp"].get_local_rank(), group=mesh.get_group("pp"))
            schedule = ScheduleGPipe(target, n_microbatches=2, loss_fn=loss_of)
        if kind in ("2d", "pipeline x fsdp", "hsdp"):
            fully_shard(model, mesh=mesh if kind == "hsdp" else mesh["dp"])
        optimizer = job.optimizer(adam(model.parameters()), target)
        try:
            job.batches(data, 12)
        except InvalidRequestError as error:
            assert "does not say which ranks have data" in str(error), error
        else:
            raise AssertionError(kind)
        data_mesh = mesh if kind == "hsdp" else mesh["dp"]
        size = 6 if kind == "hsdp" else 12
        for x, y in job.batches(data, size, shuffle=False, drop_last=True, mesh=data_mesh):
            optimizer.zero_grad()
            if schedule is None:
                loss_of(model(x), y).backward()
            elif target.is_first:
                schedule.step(x)
            else:
                schedule.step(target=y)
            optimizer.step()
        check(kind, saved(job), reference(adam, 24, size=240), 1e-5)
"""

JOB = """
import os, torch, psworker
import torch.distributed as dist
from torch import nn

rows = torch.randn(240, 5, generator=torch.Generator().manual_seed(5))
data = rows, rows.sum(1, keepdim=True)
ranks = int(os.environ.get("WORLD_SIZE", 1))

def train(name, make, has_statistics, batch_size):
    middle = [nn.BatchNorm1d(7)] if has_statistics else []
    model = nn.Sequential(nn.Linear(5, 7, bias=False), *middle, nn.Tanh(), nn.Linear(7, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)
    with psworker.connect(wait_timeout=60) as job:
        if ranks > 1:
            from torch.distributed.fsdp import fully_shard
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = job.optimizer(make(model.parameters(), lr=0.01), model)
        for x, y in job.batches(data, batch_size=batch_size, epochs=4, seed=1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        assert job.version == 20
        if job.rank == 0 and job.is_first:
            job.save(os.environ["OUT"] + name)

for number in map(int, os.environ["NUMBERS"]):
    for make in (torch.optim.SGD, torch.optim.Adam):
        train(f"-{make.__name__}-{number}", make, number == 0, int(os.environ["BATCH_SIZE"]))
if ranks > 1:
    train("-again", torch.optim.Adam, True, 12)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def test_fsdp2_equals_one_process(programs: Programs) -> None:
    out = run_ranks(programs, 2, FSDP, width=7)

    for kind in ("nested", "True", "False", "part"):
        assert f"ok {kind} sgd" in out
    assert "ok memory" in out


def test_meshes_of_two_dimensions_equal_one_process(programs: Programs) -> None:
    assert run_ranks(programs, 4, MESHES, width=8).count("ok ") == 5


def test_two_groups_equal_workers(programs: Programs) -> None:
    """They equal four workers, and without statistics two workers with batches of double size."""
    programs.script(JOB)
    for out, numbers, size, *flags in (
        ("groups", "01", 12, "--workers", 2, "--group-size", 2),
        ("four", "0", 12, "--workers", 4),
        ("two", "1", 24, "--workers", 2),
    ):
        settings = {"OUT": out, "NUMBERS": numbers, "BATCH_SIZE": size}
        run = programs.start("ps-run", *flags, "train.py", **settings)
        assert run.wait(120) == 0, run.output

    for optimizer, tolerance in (("SGD", 1e-6), ("Adam", 1e-5)):
        for number, other in enumerate(("four", "two")):
            found = load_file(programs.folder / f"groups-{optimizer}-{number}")
            expected = load_file(programs.folder / f"{other}-{optimizer}-{number}")
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                limit = tolerance * float(value.abs().max())
                torch.testing.assert_close(found[name], value, rtol=0, atol=limit, msg=name)
    first, again = (load_file(programs.folder / f"groups-{end}") for end in ("Adam-0", "again"))
    assert all(torch.equal(first[name], again[name]) for name in first)
