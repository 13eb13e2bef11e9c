"""Workers with models on a GPU and real servers train the same as workers on the CPU."""

import copy
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psworker import DistributedTraining, Job
from psworker.client.local_client import LocalClient
from tests.support.cluster import Cluster
from tests.support.lanes import each_lane
from tests.support.programs import Programs, programs_in
from tests.support.training_threads import real

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU on this machine"
    ),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
    pytest.mark.filterwarnings(
        "ignore:Attempting to run cuBLAS, but there was no current CUDA context"
    ),
]

Make = Callable[..., Cluster]
Values = dict[str, Tensor]
GPU = "cuda"
STEPS = 6


class ManyKindsModel(nn.Module):
    """Tied weights, buffers, a flattened recurrent layer, a frozen part, and one that is never
    called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.out.weight = self.into.weight
        self.norm, self.lstm = nn.BatchNorm1d(4), nn.LSTM(2, 3, batch_first=True)
        self.frozen, self.lent, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        x = self.out(torch.relu(self.norm(self.into(x))))
        x = self.frozen(self.lstm(x.view(-1, 2, 2))[0][:, -1]) @ self.lent.weight
        out: Tensor = self.last(x)
        return out


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2)
    )


def initial(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the same for each worker: workers are threads here and share torch's generator."""
    model, generator = make(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def values(model: nn.Module) -> Values:
    """Return values in float64, in which CPU and GPU are compared: a GPU computes in TF32, too."""
    return {
        name: value.detach().to("cpu", torch.float64, copy=True)
        for name, value in model.state_dict().items()
    }


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def trained(
    job: Job, make: Callable[[], nn.Module], device: str, dtype: torch.dtype, **how: bool
) -> Values:
    model = initial(make).to(device, dtype)
    optimizer = job.optimizer(
        torch.optim.SGD(trainable(model), lr=0.02, momentum=0.9), model, **how
    )
    for number in range(STEPS):
        x, y = (each.to(device, dtype) for each in batch(job.rank, number))
        F.mse_loss(model(x), y).backward()
        if number % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert all(
        parameter.device.type == torch.device(device).type for parameter in model.parameters()
    )
    return values(model)


def assert_close(found: Values, expected: Values, **tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **(tolerance or {"rtol": 1e-6, "atol": 1e-9}), msg=name
        )


@each_lane
@pytest.mark.parametrize("overlap", [False, True], ids=["whole", "overlap"])
@pytest.mark.parametrize("make", [ManyKindsModel, layers])
def test_two_workers_on_a_gpu_train_the_same_as_two_on_the_cpu(
    cluster: Make, make: Callable[[], nn.Module], overlap: bool, lanes: str
) -> None:
    on_cpu, on_gpu = (
        real(
            cluster(2, min_workers=2, lanes=lanes).address,
            2,
            lambda job, device=device: trained(job, make, device, torch.float64, overlap=overlap),  # type: ignore[misc]
        )
        for device in ("cpu", GPU)
    )

    for found, expected in zip(on_gpu, on_cpu, strict=True):
        assert_close(found, expected)
    assert_close(on_gpu[0], on_gpu[1], rtol=0, atol=0)


def test_half_precision_with_overlap_trains_the_same(cluster: Make) -> None:
    runs = [
        real(
            cluster(2).address,
            1,
            lambda job, on=on: trained(job, layers, GPU, torch.bfloat16, overlap=on),  # type: ignore[misc]
        )
        for on in (False, True)
    ]

    assert_close(runs[1][0], runs[0][0], rtol=0, atol=0)


@each_lane
def test_a_pipeline_on_a_gpu_trains_the_same_as_on_the_cpu(cluster: Make, lanes: str) -> None:
    on_cpu, on_gpu = (
        real(
            cluster(2, policy="async", lanes=lanes).address,
            1,
            lambda job, device=device: trained(job, layers, device, torch.float64, pipeline=True),  # type: ignore[misc]
        )
        for device in ("cpu", GPU)
    )

    assert_close(on_gpu[0], on_cpu[0])


@pytest.mark.parametrize("overlap", [False, True], ids=["whole", "overlap"])
def test_work_on_a_stream_of_the_script_is_awaited(overlap: bool) -> None:
    expected = trained(Job(LocalClient()), ManyKindsModel, "cpu", torch.float64, overlap=overlap)

    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        found = trained(Job(LocalClient()), ManyKindsModel, GPU, torch.float64, overlap=overlap)

    assert_close(found, expected)


@pytest.mark.parametrize("overlap", [False, True], ids=["whole", "overlap"])
def test_grad_scaler_skips_and_steps_as_in_plain_torch(overlap: bool) -> None:
    """The scale begins so high that the first steps overflow and are skipped."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, Values]:
        scaler = torch.amp.GradScaler(GPU, init_scale=2.0**40, backoff_factor=2.0**-12)
        for number in range(8):
            x, y = (each.to(GPU) for each in batch(0, number))
            with torch.autocast(GPU, torch.float16):
                loss = F.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), values(model)

    plain, mine = (initial(layers).to(GPU) for _ in range(2))
    scale, expected = run(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    job = Job(LocalClient())
    optimizer = job.optimizer(
        torch.optim.SGD(mine.parameters(), lr=0.1, fused=True), mine, overlap=overlap
    )

    assert run(mine, optimizer)[0] == scale
    assert 0 < job.version < 8
    assert_close(values(mine), expected, rtol=1e-2, atol=1e-2)


def test_a_model_on_a_gpu_is_copied_saved_and_pulled_into() -> None:
    job, model = Job(LocalClient()), initial(layers).to(GPU)
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, overlap=True)
    x, y = (each.to(GPU) for each in batch(0, 0))
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        twin, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert_close(values(twin), values(model), rtol=0, atol=0)
        assert all(
            torch.equal(value, model.state_dict()[name]) for name, value in torch.load(file).items()
        )
        job.pull()
        job.pull()
        assert_close(values(model), values(twin), rtol=0, atol=0)


@pytest.mark.parametrize("simulate", [True, False])
def test_train_distributed_uses_gpus_in_turn(simulate: bool) -> None:
    inputs, _ = batch(0, 0)
    data = inputs.repeat(15, 1), (inputs.sum(1) > 0).long().repeat(15)
    model = initial(layers)

    result = DistributedTraining(servers=2).train_distributed(
        model,
        data,
        nodes=2,
        epochs=4,
        batch_size=10,
        use_gpus=True,
        simulate=simulate,
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
    )

    assert (result["device"], result["samples"]) == ("cuda:0", 480)
    assert all(not value.is_cuda for value in result["state_dict"].values())
    with torch.no_grad():
        assert float((model.eval()(data[0]).argmax(1) == data[1]).float().mean()) > 0.9


SCRIPT = """
import torch, psworker
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
data = torch.rand(80, 6), torch.randint(0, 3, (80,))
with psworker.connect() as job:
    layers = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    model = nn.Sequential(*layers).to(job.device)
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    pin_memory = job.device.type == "cuda"
    for x, y in job.batches(
        data, batch_size=8, epochs=4, seed=3, num_workers=1, pin_memory=pin_memory
    ):
        loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    size = sum(p.square().sum() for p in model.parameters())
    job.report(size=size, cuda=size.is_cuda)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs_in(tmp_path_factory.mktemp("cuda")) as programs:
        programs.script(SCRIPT)
        yield programs


@pytest.mark.timeout(300)
def test_a_script_runs_on_a_gpu_as_on_the_cpu(programs: Programs) -> None:
    """With a DataLoader process forked from one that uses the GPU, and with pinned batches."""

    def metrics(device: str, overlap: str) -> dict[str, Any]:
        file = f"{device}-{overlap}.json"
        run = programs.run(
            "ps-run",
            "--servers",
            2,
            "--workers",
            2,
            "--device",
            device,
            "--overlap",
            overlap,
            "--summary",
            file,
            "train.py",
        )
        assert run.wait() == 0, run.output
        found: dict[str, Any] = json.loads((programs.folder / file).read_text())["metrics"]
        return found

    expected = metrics("cpu", "off")
    for overlap in ("off", "on"):
        found = metrics(GPU, overlap)
        assert found["cuda"] == 1
        assert found["size"] == pytest.approx(expected["size"], rel=1e-2)
