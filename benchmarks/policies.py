"""Loss against wall-clock time under sync, async and ssp: the same job, with one of two workers
slowed down.

    python -m benchmarks.policies [--slowdown 0.05] [--runs 3]

Writes docs/policies.csv (policy, run, seconds, version, loss on the test set) and
docs/policies.png.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

POLICIES = {"sync": [], "ssp, S = 3": ["--staleness", "3"], "async": []}
ROOT = Path(__file__).parents[1]
Row = tuple[str, int, float, int, float]


def run(policy: str, number: int, slowdown: float, epochs: int) -> list[Row]:
    """One training run; its measurements."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "curve.csv"
        command = [
            str(Path(sys.executable).with_name("ps-run")),
            "--servers",
            "1",
            "--workers",
            "2",
        ]
        command += [
            "--policy",
            policy.split(",")[0],
            *POLICIES[policy],
            str(ROOT / "benchmarks/policies_worker.py"),
        ]
        subprocess.run([*command, str(output), str(slowdown), str(epochs)], check=True, cwd=ROOT)
        with output.open() as file:
            return [
                (policy, number, float(s), int(v), float(loss)) for s, v, loss in csv.reader(file)
            ]


def plot(rows: list[Row], slowdown: float, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for color, policy in zip(("tab:blue", "tab:green", "tab:orange"), POLICIES, strict=True):
        for number in sorted({row[1] for row in rows}):
            points = [(row[2], row[4]) for row in rows if row[:2] == (policy, number)]
            label = policy if number == 0 else None
            axes.plot(
                *zip(*points, strict=True), color=color, alpha=0.7, linewidth=1.2, label=label
            )
    axes.set(xlabel="seconds", ylabel="test loss", yscale="log")
    axes.set_title(
        f"digits, 2 workers, one of them {slowdown * 1e3:.0f} ms slower a step", fontsize=10
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--slowdown", type=float, default=0.05, help="seconds added to each step of worker 1"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    rows = [
        row
        for number in range(options.runs)
        for policy in POLICIES
        for row in run(policy, number, options.slowdown, options.epochs)
    ]
    with (ROOT / "docs/policies.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["policy", "run", "seconds", "version", "test_loss"])
        writer.writerows(rows)
    plot(rows, options.slowdown, ROOT / "docs/policies.png")


if __name__ == "__main__":
    main()
