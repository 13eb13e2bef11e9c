"""The texts of psworker's errors: WHAT failed: WHY. Try: HOW.

Other tests assert reasons, exit codes and the names of arguments. A changed text changes this file.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import psworker
from pscommon.core.errors import PSError
from psworker.client.local_client import LocalClient
from psworker.connect import choose_device
from psworker.core.server_search import ServerDescription, ServerSearch
from psworker.integrations import check_device, refuse_checkpoint
from psworker.job import Job
from psworker.session.arguments import attempt_of, check_integer, lanes_of, time_limit
from psworker.training_arguments import check_data, check_loss, make_module, optimizer_maker

MAX_CHARACTERS = 200
DETAIL_CHARACTERS = {"moved model": 100}
NUMBERS = torch.arange(10.0)


class Endless(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return iter(())


class Custom(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise NotImplementedError


def batches(dataset: Any = NUMBERS, **arguments: Any) -> Callable[[], object]:
    """Return a call of `Job.batches` in a job without servers."""
    return lambda: Job(LocalClient()).batches(dataset, **arguments)


def optimizer(model: nn.Module, other: nn.Module | None = None, **options: Any) -> object:
    """Return a call of `Job.optimizer` with SGD over parameters of the other model."""
    sgd = torch.optim.SGD((other or model).parameters(), lr=0.1)
    return lambda: Job(LocalClient()).optimizer(sgd, model, **options)


def second_optimizer() -> None:
    job, model = Job(LocalClient()), nn.Linear(1, 1)
    for _ in range(2):
        job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def replaced_pass() -> None:
    job, model = Job(LocalClient()), nn.Linear(1, 1)
    job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = job.batches(NUMBERS, 2)
    first = iter(loader)
    next(first)
    iter(loader)
    next(first)


def moved_model() -> None:
    job, model = Job(LocalClient()), nn.Linear(2, 2, bias=False)
    server_optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model.double()
    server_optimizer.step()


def handed_over(failure: Callable[[Any, Any], object]) -> Callable[[], object]:
    """Return a call of `failure` with the script's optimizer and the one of the job."""

    def call() -> object:
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return failure(sgd, Job(LocalClient()).optimizer(sgd, model))

    return call


def tied_storage() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight.data = model[0].weight.data[:1].expand(2, 2)
    return model


def with_buffer(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_buffer("odd", value)
    return model


def search(*shards: int) -> None:
    """Let these of three shards answer, and check the search after its grace period."""
    found = ServerSearch([f"s{shard}:1" for shard in shards], 0.0, 1.0)
    for shard in shards:
        answer = ServerDescription("job", shard, 3, (), "")
        found.answered(f"s{shard}:1", answer, 0.0)
    found.check(2.0)


def twins() -> None:
    found = ServerSearch(["a:1", "b:1"], 0.0, 1.0)
    for address in ("a:1", "b:1"):
        found.answered(address, ServerDescription("job", 0, 2, (address, ""), ""), 0.0)


SAMPLER = DistributedSampler(range(10), num_replicas=2, rank=0)
FAILURES: dict[str, Any] = {
    # job.batches
    "batch size": batches(),
    "dataset": batches(3, batch_size=2),
    "tuple of arrays": batches((np.zeros(3),), batch_size=2),
    "rows": batches((torch.zeros(3), torch.zeros(4)), batch_size=2),
    "keyword": batches(batch_size=2, nun_workers=1),
    "numbers": batches(batch_size=0),
    "batch sampler and size": batches(batch_size=2, batch_sampler=[[1]]),
    "sampler and shuffle": batches(batch_size=2, sampler=[1], shuffle=True),
    "sampler and epochs": batches(batch_size=2, sampler=[1], epochs=2),
    "distributed sampler": batches(batch_size=2, sampler=SAMPLER),
    "sampler": batches(batch_size=2, sampler=3),
    "iterator": batches(batch_size=2, sampler=iter([1])),
    "indices": lambda: iter(batches(batch_size=2, sampler=["a"], seed=0)()),  # type: ignore[call-overload]
    "batch of indices": lambda: iter(batches(batch_sampler=[1], seed=0)()),  # type: ignore[call-overload]
    "empty batch": lambda: iter(batches(batch_sampler=[[]], seed=0)()),  # type: ignore[call-overload]
    "stream option": batches(Endless(), batch_size=2, drop_last=True),
    "sources": batches(Endless(), batch_size=2, sources=2),
    "loader": batches(DataLoader(NUMBERS, 2), batch_size=2),
    "loader class": batches(Custom(NUMBERS, 2)),
    "loader without batches": batches(DataLoader(NUMBERS, batch_size=None)),
    "pass": replaced_pass,
    "no optimizer": lambda: next(iter(batches(batch_size=2)())),  # type: ignore[call-overload]
    # job.optimizer and the model
    "second optimizer": second_optimizer,
    "pipeline": optimizer(nn.Linear(1, 1), pipeline=True, overlap=True),
    "clip norm": optimizer(nn.Linear(1, 1), clip_norm=-1.0),
    "lazy": optimizer(nn.LazyLinear(1)),
    "other model": optimizer(nn.Linear(1, 1), nn.Linear(1, 1)),
    "meta": optimizer(nn.Linear(1, 1, device="meta")),
    "buffer": optimizer(with_buffer(torch.zeros(1, dtype=torch.complex64))),
    "memory": optimizer(tied_storage()),
    "max_norm": optimizer(nn.Embedding(2, 2, max_norm=1.0)),
    "sparse": optimizer(nn.Embedding(2, 2, sparse=True)),
    "moved model": moved_model,
    "original step": handed_over(lambda sgd, _: sgd.step()),
    "copied optimizer": handed_over(lambda _, servers: copy.deepcopy(servers).step()),
    "samples": handed_over(lambda _, servers: servers.step(samples=0)),
    "new group": handed_over(lambda _, servers: servers.add_param_group({"params": []})),
    "new parameters": handed_over(
        lambda sgd, servers: (sgd.param_groups[0]["params"].pop(), servers.step())
    ),
    "moments": handed_over(
        lambda _, servers: servers.load_state_dict({"state": {0: {"step": 1}}, "param_groups": []})
    ),
    "plateau": handed_over(
        lambda sgd, _: Job(LocalClient()).resume(torch.optim.lr_scheduler.ReduceLROnPlateau(sgd))
    ),
    "save": lambda: Job(LocalClient()).save("model.safetensors"),
    # arguments
    "servers": psworker.connect,
    "device": lambda: choose_device("tpu", 0),
    "integer": lambda: check_integer("rank", -1, 0, 3),
    "seconds": lambda: time_limit("wait_timeout", 0),
    "lanes": lambda: lanes_of("tcp", {}),  # type: ignore[arg-type]
    "environment": lambda: attempt_of({"PS_WORKER_ATTEMPT": "x"}),
    # train_distributed
    "module": lambda: make_module(None),  # type: ignore[arg-type]
    "factory": lambda: make_module("module"),
    "data": lambda: check_data(DataLoader(NUMBERS)),
    "pair": lambda: check_data((NUMBERS,)),
    "loss": lambda: check_loss("mse"),  # type: ignore[arg-type]
    "optimizer": lambda: optimizer_maker("adam", nn.Linear(1, 1)),  # type: ignore[arg-type]
    # frameworks
    "framework device": lambda: check_device(
        Job(LocalClient()), torch.device("cuda"), "accelerate"
    ),
    "checkpoint": lambda: refuse_checkpoint("last.ckpt"),
    # servers
    "incomplete": lambda: search(0, 1),
    "two processes": twins,
}
TEXTS = {
    "batch size": "batch_size is missing. Try: job.batches(dataset, batch_size=32)",
    "dataset": (
        "job.batches cannot read a int: it is neither a map-style data set (len() and items by "
        "number) nor a stream. Try: a list, a tensor, or an object with read(source, offset)"
    ),
    "tuple of arrays": (
        "a tuple is read as the rows of its tensors, and this one has ndarray. Try: make tensors "
        "of arrays (torch.from_numpy); give samples that are not rows of tensors as a list"
    ),
    "rows": (
        "the tensors of a data set have different numbers of rows: their shapes are [[3], [4]]. "
        "Try: tensors with the same first dimension"
    ),
    "keyword": (
        "nun_workers=... is not valid: neither job.batches nor torch's DataLoader has this "
        "keyword. Try: check its spelling"
    ),
    "numbers": (
        "batch_size, epochs or sources of job.batches is not valid: batch_size must be at least "
        "1, not 0. Try: positive whole numbers"
    ),
    "batch sampler and size": (
        "batch_sampler excludes batch_size: it gives complete batches, in its own order. Try: "
        "leave out batch_size"
    ),
    "sampler and shuffle": (
        "sampler excludes shuffle=True: it gives the order. Try: leave out shuffle"
    ),
    "sampler and epochs": (
        "sampler excludes epochs=2: it gives the order of one pass at a time. Try: `for epoch in "
        "range(epochs): for batch in loader: ...`"
    ),
    "distributed sampler": (
        "sampler=DistributedSampler would divide the data a second time: job.batches already "
        "gives each sample to one worker. Try: leave it out, with shuffle=True or False"
    ),
    "sampler": "sampler=3 is not iterable. Try: a sampler of torch.utils.data",
    "iterator": (
        "sampler is an iterator (list_iterator), which gives one pass only. Try: a list, or a "
        "sampler whose iter() begins a new pass"
    ),
    "indices": (
        "sampler list failed to give indices: 'str' object cannot be interpreted as an integer. "
        "Try: a sampler of 64-bit integers"
    ),
    "batch of indices": (
        "batch_sampler list gave 1 instead of a list of indices. Try: pass it as sampler"
    ),
    "empty batch": "batch_sampler list gave an empty batch. Try: leave it out",
    "stream option": (
        "drop_last cannot apply to a stream: it is read in order, in this process. Try: leave out"
        " drop_last"
    ),
    "sources": (
        "Endless cannot be read as 2 sources: it has no read(source, offset). Try: add this "
        "method, or give an IterableDataset, which is one source"
    ),
    "loader": (
        "the DataLoader excludes batch_size: it has its own. Try: job.batches(loader), or "
        "job.batches(loader.dataset, batch_size=...) with all options"
    ),
    "loader class": (
        "Custom cannot be divided among workers: it defines its own __iter__. Try: "
        "job.batches(loader.dataset, batch_size=...), with its transform as collate_fn"
    ),
    "loader without batches": (
        "a DataLoader with batch_size=None cannot be used: it makes no batches. Try: a data set "
        "of samples, with a batch_size"
    ),
    "pass": (
        "cannot continue this pass: iter() has begun the loader's next one. Try: for a loop "
        "inside a loop over the same data make another loader with job.batches"
    ),
    "no optimizer": (
        "cannot begin this pass: there is no model yet. Try: call job.optimizer first"
    ),
    "second optimizer": (
        "job.optimizer failed: an optimizer without a name is the only one of its job. Try: a "
        'name for each, such as job.optimizer(..., name="generator")'
    ),
    "pipeline": "pipeline=True excludes overlap=True. Try: leave out one of them",
    "clip norm": (
        "clip_norm=-1.0 is not valid. Try: a finite number above 0, or None for no clipping"
    ),
    "lazy": (
        "weight has no shape yet: its module is lazy. Try: run a batch through the model before "
        "job.optimizer"
    ),
    "other model": (
        "parameter 0 of the optimizer's group 0, shape [1, 1], is not in the model. Try: give "
        "job.optimizer the model whose parameters the optimizer was made from"
    ),
    "meta": (
        "the model is not on one device, but on meta. Try: model.to(job.device) before "
        "job.optimizer"
    ),
    "buffer": (
        "buffer odd has dtype complex64, which servers cannot store. Try: another dtype; with "
        "register_buffer(..., persistent=False) a buffer stays on its worker"
    ),
    "memory": (
        "1.weight and 0.weight lie in the same memory, and would be separated. Try: tie the "
        "Parameter itself (m[1].weight = m[0].weight), or give each its own copy"
    ),
    "max_norm": (
        "Embedding has max_norm, which changes weights in place at each forward, but the job's "
        "weights are on the servers. Try: make it without max_norm, and bound its output"
    ),
    "sparse": (
        "Embedding makes sparse gradients, which servers do not support. Try: make it with "
        "sparse=False"
    ),
    "moved model": (
        "weight has changed from (torch.float32, device(type='cpu'), torch.Size([2, 2])) to "
        "(torch.float64, device(type='cpu'), torch.Size([2, 2])) since job.optimizer. Try: move, "
        "cast and reshape the model before job.optimizer"
    ),
    "original step": (
        "this optimizer was given to the job. Try: call step() of the optimizer that "
        "job.optimizer(...) returned, which takes its place"
    ),
    "copied optimizer": (
        "this is a copy of a job's optimizer: it has the settings, but no job. Try: call step() "
        "of the optimizer that job.optimizer(...) returned"
    ),
    "samples": (
        "samples=0: the weight of a gradient is a whole number of samples, at least 1. Try: to "
        "leave a gradient out, do not call step()"
    ),
    "new group": (
        "the parameters of a job are fixed. Try: give the optimizer all of them before "
        "job.optimizer, and switch requires_grad"
    ),
    "new parameters": (
        "the parameters of a group are fixed, but a group has others now. Try: change values in "
        "place (group['lr'] = ...), and leave weights out by requires_grad"
    ),
    "moments": (
        "this optimizer has made steps, and its state cannot be brought to the servers. Try: a "
        "fresh torch optimizer; the servers resume their own snapshot (`--resume`)"
    ),
    "plateau": (
        "ReduceLROnPlateau depends on measured values, which no job keeps. Try: save and load its "
        "state_dict()"
    ),
    "save": "job.save failed: there is no model yet. Try: call job.optimizer first",
    "servers": (
        "cannot connect: no servers are named. Try: start the script with `ps-run ... SCRIPT` (a "
        "job on this machine) or `ps-worker --ps HOST:PORT SCRIPT`, or set PS_SERVERS or "
        "PS_LOCAL=1"
    ),
    "device": "device 'tpu' is not valid. Try: auto, cpu, cuda or cuda:K",
    "integer": "rank=-1 is not valid. Try: a whole number from 0 to 3",
    "seconds": "wait_timeout=0 is not valid. Try: a positive number of seconds",
    "lanes": "lanes 'tcp' is not valid. Try: one of auto, shm, stream, grpc",
    "environment": "PS_WORKER_ATTEMPT='x' is not valid. Try: a whole number from 0",
    "module": ('model cannot be a NoneType. Try: a torch.nn.Module, or "package.module:function"'),
    "factory": (
        "model 'module' is not valid: module or function is missing. Try: "
        '"package.module:function"'
    ),
    "data": (
        "data cannot be a DataLoader: each node makes its own batches. Try: its data set "
        "(loader.dataset), with batch_size and shuffle as arguments"
    ),
    "pair": "data has 1 tensors. Try: a pair of tensors (inputs, targets), or a data set",
    "loss": (
        "loss cannot be 'mse'. Try: a function of output and target, such as torch.nn.MSELoss()"
    ),
    "optimizer": (
        "optimizer cannot be 'adam'. Try: a torch.optim optimizer, or a function that makes one, "
        "such as torch.optim.SGD"
    ),
    "framework device": (
        "accelerate computes on cuda, but this worker's device is cpu. Try: set "
        "ACCELERATE_TORCH_DEVICE=cpu before accelerate is imported, or `--device cuda`"
    ),
    "checkpoint": (
        "cannot resume from last.ckpt: the servers have weights and optimizer state. Try: start "
        "the servers with `--data-dir DIR`; they resume their newest snapshot"
    ),
    "incomplete": (
        "s0:1 is shard 0, s1:1 is shard 1; no server knows the address of shard 2 of 3. Try: list"
        " every server, or start the others with `--join` and the address of shard 0"
    ),
    "two processes": (
        "a:1 and b:1 are both shard 0 of 2. Try: list every server, or start the others with "
        "`--join` and the address of shard 0"
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PS_SERVERS", raising=False)
    monkeypatch.delenv("PS_LOCAL", raising=False)

    with pytest.raises(PSError) as caught:
        FAILURES[name]()

    assert str(caught.value) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_one_remedy_and_is_short(name: str) -> None:
    text = TEXTS[name]

    assert text.count(". Try: ") == 1
    assert len(text) <= MAX_CHARACTERS + DETAIL_CHARACTERS.get(name, 0)
    assert not text.endswith(".")
