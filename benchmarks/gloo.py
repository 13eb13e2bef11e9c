"""Contender: gloo all_reduce of as many bytes between two processes, what a DDP user has. Args: MB."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contender import serve


def join(file: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)


def follower(file: str, numbers: int) -> None:
    """Reduces as often as the leader does; its word is a broadcast flag."""
    join(file, 1)
    tensor, go = torch.ones(numbers), torch.ones(1)
    while True:
        dist.broadcast(go, 0)
        if not go.item():
            dist.destroy_process_group()
            return
        dist.all_reduce(tensor)


def main(megabytes: int) -> None:
    numbers = megabytes * 1_000_000 // 4
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "store")
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.gloo", str(megabytes), file])
        join(file, 0)
        tensor = torch.ones(numbers)

        def work() -> float:
            dist.broadcast(torch.ones(1), 0)
            began = time.perf_counter()
            dist.all_reduce(tensor)
            return time.perf_counter() - began

        serve(work)
        dist.broadcast(torch.zeros(1), 0)
        process.wait(30)
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        follower(sys.argv[2], int(sys.argv[1]) * 1_000_000 // 4)
    else:
        main(int(sys.argv[1]))
