"""The training script of the benchmark: steps of a transformer on random tokens.

Writes a JSON file with what a step takes. The variables BENCH_*: see `benchmarks.gpu.measure`.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psworker

WARM_UP_COUNT = 2


class Transformer(nn.Module):
    """A decoder without a cache: embedding, layers, and the embedding again."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.embedding(tokens))
        return F.linear(hidden, self.embedding.weight)


def median_seconds(act: Callable[[], object], device: torch.device, count: int) -> float:
    """Return how long a call takes, with the work that it gives to the GPU."""
    seconds = []
    for _ in range(WARM_UP_COUNT + count):
        synchronize(device)
        begin = time.perf_counter()
        act()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[WARM_UP_COUNT:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    options = json.loads(os.environ["BENCH_OPTIONS"])
    torch.manual_seed(0)
    with psworker.connect() as job:
        device = job.device
        model = Transformer(*options["shape"]).to(device)
        batch, length = options["batch"]
        tokens = torch.randint(0, options["shape"][2], (batch, length), device=device)
        optimizer = job.optimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-4), model, **options["how"]
        )

        def compute() -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens)
            F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()

        def step() -> None:
            compute()
            if not options["how"]:  # or the wait for the GPU would count as part of the push
                synchronize(device)
            optimizer.step()

        found = {
            "compute": median_seconds(compute, device, options["steps"]),
            "step": median_seconds(step, device, options["steps"]),
            **{
                phase: seconds / job.stats.steps
                for phase, seconds in job.stats.total.items()
                if phase in ("push", "wait", "apply", "pull")
            },
        }
        if options["how"].get("pipeline"):
            job.wait()
        if job.is_first:
            Path(options["output"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
