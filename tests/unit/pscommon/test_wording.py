"""The texts of pscommon's errors: WHAT failed: WHY. Try: HOW.

Other tests assert reasons, exit codes and the names of arguments. A changed text changes this file.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pscommon.core.errors import PSError
from pscommon.core.formats import check_file_format, check_wire_format
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.optim import KINDS, Lion, check_same_optimizers, load_module, register
from pscommon.optim.specs import groups_from_json, spec_of, validate
from pscommon.settings import values
from pscommon.snapshot.data_dir_lock import DataDirLock
from pscommon.system.local_jobs import only_local_job
from pscommon.telemetry import http
from pscommon.wire.status import error_from

MAX_CHARACTERS = 200
NAMES = ", ".join(sorted(KINDS))
CLASSES = ", ".join(sorted(kind.torch_class.__name__ for kind in KINDS.values()))
DETAIL_CHARACTERS = {"unknown optimizer": len(NAMES), "refused class": len(CLASSES) + 25}
SGD = OptimizerSettings("sgd", ({"lr": 0.1},))


class MeanStep(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})


def mean_formula(weight: Any, gradient: Any, state: Any, group: Any) -> None:
    weight.sub_(gradient.mean())


def in_use() -> None:
    with DataDirLock(Path("data"), 0), DataDirLock(Path("data"), 0):
        pass


def symbolic_link() -> None:
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    (folder / "shard-0.lock").symlink_to("target")
    with DataDirLock(folder, 0):
        pass


def taken_port() -> None:
    raise http._cannot_bind("h:1", OSError(errno.EADDRINUSE, ""))


def lbfgs() -> None:
    spec_of(torch.optim.LBFGS([torch.zeros(1, requires_grad=True)]))


def mixed_adam() -> None:
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}]
    adam = torch.optim.Adam(groups)
    adam.param_groups[0]["decoupled_weight_decay"] = True
    spec_of(adam)


def refused(code: grpc.StatusCode) -> Callable[[], None]:
    class Failed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return code

        def details(self) -> str:
            return "details"

        def trailing_metadata(self) -> tuple[()]:
            return ()

    def fail() -> None:
        raise error_from(Failed(), "shard 1 at h:1")

    return fail


FAILURES: dict[str, Callable[[], object]] = {
    "wire format": lambda: check_wire_format(9, "shard 1 at h:1", "this worker"),
    "file format": lambda: check_file_format(9, 1, "/data/log-job"),
    "data directory": in_use,
    "lock": symbolic_link,
    "local jobs": lambda: only_local_job("`--ps HOST:PORT` is missing"),
    "metrics address": lambda: http._split("nowhere"),
    "metrics port": taken_port,
    "module": lambda: load_module("no_such_module"),
    "registration": lambda: register(MeanStep, mean_formula),
    "reserved name": lambda: register(MeanStep, mean_formula, states=("step",)),
    "other optimizers": lambda: check_same_optimizers("shard 1", "x (0)", "shard 0"),
    "unknown optimizer": lambda: validate(OptimizerSettings("nope", ({},))),
    "refused class": lbfgs,
    "mixed Adam": mixed_adam,
    "hyper-parameter": lambda: validate(OptimizerSettings("sgd", ({"rate": 1.0},))),
    "no group": lambda: validate(OptimizerSettings("sgd", ())),
    "groups": lambda: groups_from_json("[]", SGD),
    "policy": lambda: values.check_policy("ssp", None),
    "bound": lambda: values.check_policy("async", 3),
    "integer dtype": lambda: ModelSpec((TensorSpec("w", (1,), "int64", "trainable"),), SGD),
    "lion": lambda: Lion([torch.zeros(1)], lr=-1.0),
    "unreachable": refused(grpc.StatusCode.UNAVAILABLE),
    "overloaded": refused(grpc.StatusCode.RESOURCE_EXHAUSTED),
    "silent": refused(grpc.StatusCode.DEADLINE_EXCEEDED),
    "other program": refused(grpc.StatusCode.UNIMPLEMENTED),
}
TEXTS = {
    "wire format": (
        "shard 1 at h:1 uses message format 9, but this worker uses format 2. Try: "
        "install the newer release of paramserver for this worker too"
    ),
    "file format": (
        "/data/log-job has format 9, but this release reads formats up to 1. Try: the release of "
        "paramserver that wrote it, or a newer one"
    ),
    "data directory": (
        "data directory data is in use: process PID serves shard 0. Try: stop it, or choose "
        "another `--data-dir`"
    ),
    "lock": "cannot lock shard 0: data/shard-0.lock is a symbolic link. Try: rm data/shard-0.lock",
    "local jobs": "`--ps HOST:PORT` is missing; no job of this user runs on this machine",
    "metrics address": (
        "metrics address 'nowhere' is not valid. Try: HOST:PORT, such as 127.0.0.1:9464 (port 0: "
        "any free port)"
    ),
    "metrics port": (
        "cannot serve metrics on h:1: the port is taken. Try: another port (0: any free port), or"
        " stop the process that uses it"
    ),
    "module": (
        "`--optimizers no_such_module` failed: there is no module no_such_module. Try: start this"
        " command in the module's folder, or put that folder on PYTHONPATH"
    ),
    "registration": (
        "cannot register MeanStep: its formula is not elementwise, and servers store parts of "
        "tensors. Try: a formula that treats each element by itself"
    ),
    "reserved name": (
        "cannot register MeanStep: states and scalars ['step'] have invalid names. Try: different "
        "Python identifiers, other than `weight` and `step`"
    ),
    "other optimizers": (
        "shard 1 and shard 0 have different `--optimizers`: x (0) and none. Try: start every "
        "server with the same module, of the same version"
    ),
    "unknown optimizer": (
        f"optimizer 'nope' is not one of {NAMES}. Try: one of these, or start every ps-server with "
        "`--optimizers MODULE`, which registers it"
    ),
    "refused class": (
        "servers cannot run torch.optim.lbfgs.LBFGS: its line search evaluates the model several "
        f"times in a step and needs products of complete gradients. Try: one of {CLASSES} (no "
        "subclasses), or register a formula (`--optimizers MODULE`)"
    ),
    "mixed Adam": (
        "servers cannot run this Adam: its groups differ in decoupled_weight_decay. Try: Adam or "
        "AdamW for all groups"
    ),
    "hyper-parameter": (
        "sgd, group 0: unknown hyper-parameter 'rate'. Try: one of lr, momentum, dampening, "
        "weight_decay, nesterov, maximize"
    ),
    "no group": "optimizer sgd is not valid: it has no parameter group. Try: at least one",
    "groups": "sgd has 0 parameter groups, but 1 in the job",
    "policy": (
        "`--policy ssp` needs a bound. Try: `--staleness S`, the number of steps that a worker "
        "may be ahead (0 acts as sync)"
    ),
    "bound": "`--policy async` excludes `--staleness`: it has no bound. Try: `--policy ssp`",
    "integer dtype": "tensor 'w': int64 cannot be trained. Try: a floating dtype",
    "lion": "lr is -1.0, below 0",
    "unreachable": "shard 1 at h:1 does not answer: details",
    "overloaded": "shard 1 at h:1 accepts no more calls: details",
    "silent": "shard 1 at h:1 did not answer in time",
    "other program": "shard 1 at h:1 is not a parameter server of this release: details",
}


@pytest.mark.parametrize("name", FAILURES)
def test_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    with pytest.raises((PSError, ValueError)) as caught:
        FAILURES[name]()

    assert str(caught.value).replace(str(os.getpid()), "PID") == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_at_most_one_remedy_and_is_short(name: str) -> None:
    text = TEXTS[name]

    assert text.count(". Try: ") <= 1
    assert len(text) <= MAX_CHARACTERS + DETAIL_CHARACTERS.get(name, 0)
    assert not text.endswith(".")
