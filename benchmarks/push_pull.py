"""Push 100 MB of gradients and pull 100 MB of weights, beside a bare gRPC stream and gloo, in the same run.

    python -m benchmarks.push_pull [--megabytes 100] [--rounds 11] [--output FILE.json]

Contenders take turns; figures are medians with the spread beside them, and ratios of medians to the peers.
"""

import argparse
import json
import os
import platform
import statistics
from contextlib import ExitStack
from pathlib import Path

import grpc
import torch

from benchmarks.contender import Contender


def contenders(megabytes: int) -> list[Contender]:
    return [
        Contender("paramserver, 1 worker", "benchmarks.paramserver", megabytes, 1),
        Contender("paramserver, 2 workers", "benchmarks.paramserver", megabytes, 2),
        Contender("bare gRPC stream", "benchmarks.grpc_stream", megabytes),
        Contender("gloo all_reduce, 2 processes", "benchmarks.gloo", megabytes),
    ]


def measure(megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by contender."""
    with ExitStack() as stack:
        entered = [stack.enter_context(contender) for contender in contenders(megabytes)]
        seconds: dict[str, list[float]] = {contender.name: [] for contender in entered}
        for _ in range(rounds):
            for contender in entered:
                seconds[contender.name].append(contender.measure())
    return seconds


def summary(megabytes: int, seconds: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peers = [name for name in medians if not name.startswith("paramserver")]
    ratios = {
        f"{name} / {peer}": medians[name] / medians[peer]
        for name in medians
        if name not in peers
        for peer in peers
    }  # fmt: skip
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "system": platform.release()}
    versions = {"python": platform.python_version(), "grpcio": grpc.__version__, "torch": torch.__version__}
    return {"megabytes": megabytes, "machine": machine, "versions": versions, "seconds": seconds, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    seconds = measure(options.megabytes, options.rounds)
    result = summary(options.megabytes, seconds)
    print(f"{options.megabytes} MB each way, ms: median (least to most of {options.rounds})")
    for name, values in seconds.items():
        low, middle, high = min(values) * 1e3, statistics.median(values) * 1e3, max(values) * 1e3
        print(f"  {name:30} {middle:7.1f} ({low:.1f} to {high:.1f})")
    for name, ratio in result["ratios"].items():  # type: ignore[attr-defined]
        print(f"  {name:60} {ratio:5.2f}")
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
