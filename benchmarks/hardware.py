"""What libraries under torch save in a training step and in an optimizer step, on this CPU.

`python -m benchmarks.hardware [ROUNDS]` prints a table of medians. The contenders of a row run in
turns, so that other programs on the machine slow all of them.
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

ELEMENTS_COUNT = 25_000_000
"""Of the optimizer's step: 100 MB of float32."""

Step = Callable[[], object]


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Return models with an input each."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return {
        "MLP, 2 M parameters, batch 256": (
            nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()),
            torch.rand(256, 784),
        ),
        "convolutions, batch 32": (
            nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(64, 64, 3, padding=1),
            ),
            torch.rand(32, 3, 32, 32),
        ),
        "transformer, 2 layers, 16 x 64 tokens": (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            torch.rand(16, 64, 256),
        ),
    }


def training_step(
    model: nn.Module,
    data: torch.Tensor,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    threads: int = 2,
) -> Step:
    """Return forward and backward of a model."""

    def step() -> None:
        torch.set_num_threads(threads)
        with around():
            loss = model(data).float().square().mean()
            loss.backward()
        model.zero_grad()

    return step


def optimizer_step(threads: int, **settings: bool) -> Step:
    """Return Adam's step as a server makes it."""
    weights = nn.Parameter(torch.rand(ELEMENTS_COUNT))
    weights.grad = torch.rand(ELEMENTS_COUNT)
    optimizer = torch.optim.Adam([weights], lr=1e-3, **settings)

    def step() -> None:
        torch.set_num_threads(threads)
        optimizer.step()

    return step


def measure(contenders: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 2):  # the first two warm up
        for name, step in contenders.items():
            began = time.perf_counter()
            step()
            if number > 1:
                times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}


def main(rounds: int) -> None:
    """Measure and print everything."""

    def without_onednn() -> AbstractContextManager[object]:
        return torch.backends.mkldnn.flags(enabled=False)

    def bf16() -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ms per step, medians")
    for name, (model, data) in networks().items():
        contenders = {
            "as it is": training_step(model, data),
            "one thread": training_step(model, data, threads=1),
            "without oneDNN": training_step(model, data, without_onednn),
            "bfloat16 autocast": training_step(model, data, bf16),
            "torch.compile": training_step(torch.compile(model), data),
        }
        print(name, {each: round(ms, 2) for each, ms in measure(contenders, rounds).items()})
    servers = {
        "fused, 2 threads": optimizer_step(2, fused=True),
        "fused, 1 thread": optimizer_step(1, fused=True),
        "foreach, 2 threads": optimizer_step(2, foreach=True),
        "for-loop, 2 threads": optimizer_step(2, foreach=False),
    }
    print("Adam, 100 MB", {each: round(ms, 1) for each, ms in measure(servers, rounds).items()})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 31)
