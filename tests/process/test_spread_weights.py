"""The weights of uneven batches in models that are spread over processes, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import Programs, programs_in
from tests.support.spread import run_ranks

REFUSED = """
psworker.connect().close()  # torch has its process group from here on

def train(job, model, optimizer, batch_size=12, **keys):
    for x, y in job.batches(data, batch_size, shuffle=False, **keys):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
"""

WEIGHTS = """
mesh = init_device_mesh("cpu", (2,))

def accumulate(job, kind):
    model = Net()
    if kind != "plain":
        fully_shard(model, mesh=mesh)
    optimizer = job.optimizer(sgd(model.parameters()), model)
    parts = tuple(each[:9] for each in data)
    for number, (x, y) in enumerate(job.batches(parts, 3, shuffle=False)):  # 3 and 3, 2 and 1
        if kind == "together":
            model.set_requires_gradient_sync(number == 1)
        (loss_of(model(x), y) / 2).backward()
    optimizer.step()

with psworker.connect() as job:
    accumulate(job, "each")
    whole = Net()
    optimizer = sgd(whole.parameters())
    for part in (slice(0, 6), slice(6, 9)):
        (loss_of(whole(rows[part]), data[1][part]) / 2).backward()
    optimizer.step()
    check("reduction of each batch", saved(job), whole.state_dict(), 1e-6)
for kind in ("together", "plain"):
    with psworker.connect() as job:
        refused("share in different ways", lambda: accumulate(job, kind))

with psworker.connect() as job:  # torch leaves out the reduce-scatter
    model, replicas = Net(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
    fully_shard(model, mesh=replicas)
    optimizer = job.optimizer(sgd(model.parameters()), model)
    refused("drop_last=True", lambda: train(job, model, optimizer, mesh=replicas))
    assert job.version == 10

with psworker.connect() as job:  # the root has gathered its weights
    model = fully_shard(Net(), mesh=mesh)
    optimizer = job.optimizer(sgd(model.parameters()), model, name="a")
    loss_of(model(rows), data[1]).backward()
    with torch.no_grad():
        model(rows)
    optimizer.step()
    assert job.version == 1
    print("ok gathered", flush=True)

with psworker.connect() as job:  # the hooks of a closed job
    model = fully_shard(Net(), mesh=mesh)
    optimizer = job.optimizer(sgd(model.parameters()), model)
    for x, y in job.batches(tuple(each[:3] for each in data), 3, shuffle=False):
        loss_of(model(x), y).backward()
        break
optimizer.zero_grad()
loss_of(model(rows), data[1]).backward()
whole = Net()
loss_of(whole(rows), data[1]).backward()
for (name, parameter), other in zip(model.named_parameters(), whole.parameters()):
    torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, msg=name)
print("ok closed", flush=True)

for order in ("ab", "ba"):
    with psworker.connect() as job:
        models = {"a": fully_shard(Net(), mesh=mesh), "b": Net()}
        optimizers = {name: job.optimizer(sgd(models[name].parameters()), models[name], name=name)
                      for name in order}
        for x, y in job.batches(data, 12, shuffle=False):
            for name, optimizer in optimizers.items():
                optimizer.zero_grad()
                loss_of(models[name](x), y).backward()
                optimizer.step()
        found = saved(job)
        for name in order:
            own = {key[2:]: value for key, value in found.items() if key.startswith(name + ".")}
            check(f"order {order} {name}", own, reference(sgd, 24), 1e-5)

with psworker.connect() as job:
    model = Net()
    optimizer = job.optimizer(sgd(model.parameters()), model)
    fully_shard(model, mesh=mesh)
    refused("another parameter since job.optimizer", lambda: train(job, model, optimizer))
"""

MESHES = """
plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

def build(kind):
    model = Net()
    if kind != "hsdp":
        parallelize_module(model, mesh["tp"], plan)
    if kind != "plan":
        fully_shard(model, mesh=mesh if kind == "hsdp" else mesh["dp"])
    return model

for kind in ("2d", "plan", "hsdp"):  # the last batch has 11 rows
    with psworker.connect() as job:
        model = build(kind)
        optimizer = job.optimizer(adam(model.parameters()), model)
        keys = {"mesh": mesh if kind == "hsdp" else mesh["dp"]}
        train(job, model, optimizer, 6 if kind == "hsdp" else 12, **keys)
        check(f"uneven {kind}", saved(job), reference(adam, 24), 1e-5)

for kind in ("2d", "plan"):
    for wrong in (mesh["tp"], mesh):
        with psworker.connect() as job:
            model = build(kind)
            optimizer = job.optimizer(adam(model.parameters()), model)
            refused("together, and job.batches", lambda: job.batches(data, 6, mesh=wrong))

with psworker.connect() as job:  # batches of the script's own, without job.batches
    model = build("2d")
    optimizer = job.optimizer(adam(model.parameters()), model)
    for x, y in zip(rows[:240].split(24), data[1][:240].split(24)):
        own = mesh["dp"].get_local_rank()
        optimizer.zero_grad()
        loss_of(model(x.chunk(2)[own]), y.chunk(2)[own]).backward()
        optimizer.step()
    check("own batches", saved(job), reference(adam, 24, size=240), 1e-5)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def test_weights_of_two_ranks(programs: Programs) -> None:
    assert run_ranks(programs, 2, REFUSED + WEIGHTS, width=7).count("ok ") == 11


def test_weights_on_meshes_of_two_dimensions(programs: Programs) -> None:
    assert run_ranks(programs, 4, REFUSED + MESHES, width=8).count("ok ") == 8
