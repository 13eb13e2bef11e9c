"""`python -m tests.scripts`: the scripts of plain/ beside their changed/ twins, under every
policy.

Each script is the kind of code that people bring: a training loop written for one process. The
twin in changed/ differs in the lines that README asks for. A plain run takes batches of N
samples; a job of two workers takes N/2 each, so sync must end with the loss of the plain run
where nothing in the script is random. `--write FILE` writes the table as Markdown.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import ndiff
from pathlib import Path

HERE = Path(__file__).parent
RUN_TIMEOUT_SECONDS = 120
FINAL = re.compile(r"final loss (-?[\d.]+|nan|inf)")
POLICIES: tuple[tuple[str, ...], ...] = (("sync",), ("async",), ("ssp", "--staleness", "2"))


@dataclass(frozen=True)
class Script:
    """A script and what its runs must reach.

    batch_size: samples of a plain run's batch.
    limit: largest final loss under any policy; an untrained model is above it.
    is_exact: sync on two workers gives the plain loss to a relative 1e-5.
    is_resumed: one worker gives the plain loss to 1e-6, and a resumed job that of an uninterrupted
        one.
    first_run: arguments of the run that is resumed, where it trains less than the whole.
    """

    name: str
    batch_size: int
    limit: float
    is_exact: bool = False
    is_resumed: bool = False
    first_run: tuple[str, ...] = ()

    @property
    def changed_lines(self) -> int:
        """Lines of the changed twin that the plain script does not have."""
        plain, changed = ((HERE / kind / self.name).read_text() for kind in ("plain", "changed"))
        differences = ndiff(plain.splitlines(), changed.splitlines())
        return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in differences)


SCRIPTS = (
    Script("mnist.py", 32, 1.2, is_exact=True),
    Script("vae.py", 64, 40.0),
    Script("word_language_model.py", 32, 4.0, is_exact=True),
    Script("dcgan.py", 64, 8.0),
    Script("nanogpt.py", 16, 3.3),
    Script("resnet.py", 64, 1.3),
    Script("gpt2.py", 32, 4.5, is_exact=True),
    Script("kfold.py", 32, 2.0, is_exact=True),
    Script("mean_teacher.py", 32, 1.5, is_exact=True, is_resumed=True, first_run=("--epochs", "1")),
    Script("validate_steps.py", 32, 1.3, is_exact=True),
    Script("skip_broken.py", 32, 1.5, is_exact=True),
    Script("replay.py", 32, 2.0, is_exact=True),
    Script("hf_trainer.py", 32, 4.5, is_exact=True, is_resumed=True),
    Script("hf_accelerate.py", 32, 2.2, is_exact=True, is_resumed=True),
    Script("pl_lightning.py", 32, 2.2, is_exact=True, is_resumed=True, first_run=("--epochs", "1")),
)


class ScriptError(Exception):
    """A script ended with another code than 0 or printed no final loss."""


def run(command: Sequence[str | Path]) -> float:
    """Return the final loss that a command prints; ScriptError with its output if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=RUN_TIMEOUT_SECONDS,
        check=False,
    )
    found = FINAL.findall(done.stdout)
    if done.returncode or not found:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise ScriptError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{tail}")
    return float(found[-1])


def plain_loss(script: Script) -> float:
    command = [sys.executable, HERE / "plain" / script.name, "--batch-size", str(script.batch_size)]
    return run(command)


def job_loss(
    script: Script, workers: int, *options: str | Path, arguments: Sequence[str] = ()
) -> float:
    """Return the loss that a job of two servers ends with."""
    ps_run = Path(sys.executable).parent / "ps-run"
    batch = ["--batch-size", str(script.batch_size // workers)]
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        cluster = [
            "--servers",
            "2",
            "--workers",
            str(workers),
            "--device",
            "cpu",
            "--summary",
            summary,
        ]
        loss = run([ps_run, *cluster, *options, HERE / "changed" / script.name, *batch, *arguments])
        status = json.loads(summary.read_text())["status"]
    if status != "done":
        raise ScriptError(f"{script.name}: status {status}")
    return loss


def resumed_loss(script: Script) -> float:
    """Return the loss of a job that goes on from the snapshot of an earlier run."""
    with tempfile.TemporaryDirectory() as folder:
        job_loss(script, 2, "--data-dir", folder, arguments=script.first_run)
        return job_loss(script, 2, "--data-dir", folder)


@dataclass
class Row:
    """A script's losses, by the name of the run, and what was wrong with them."""

    script: Script
    losses: dict[str, float]
    problems: list[str]

    def expect(self, name: str, tolerance: float) -> None:
        """Note a loss that differs from the plain one by more than a relative tolerance."""
        plain, loss = self.losses["plain"], self.losses[name]
        if not abs(loss - plain) <= tolerance * abs(plain):
            self.problems.append(
                f"{name} {loss} differs from plain {plain} by more than {tolerance}"
            )

    @property
    def cells(self) -> list[str]:
        names = ("plain", "sync", "async", "ssp")
        losses = [f"{self.losses[name]:.4f}" if name in self.losses else "-" for name in names]
        return [self.script.name, str(self.script.changed_lines), *losses]


def measure(script: Script) -> Row:
    """Run a script plainly and under each policy."""
    row = Row(script, {}, [])
    try:
        row.losses["plain"] = plain_loss(script)
        for policy in POLICIES:
            row.losses[policy[0]] = job_loss(script, 2, "--policy", *policy)
        if script.is_resumed:
            row.losses["one worker"] = job_loss(script, 1)
            row.losses["resumed"] = resumed_loss(script)
            row.expect("one worker", 1e-6)
            row.expect("resumed", 1e-5)
        if script.is_exact:
            row.expect("sync", 1e-5)
    except (ScriptError, subprocess.TimeoutExpired) as error:
        row.problems.append(str(error))
    for name, loss in row.losses.items():
        if not loss <= script.limit:
            row.problems.append(f"{name}: loss {loss} is above {script.limit}")
    return row


HEADER = ["script", "changed lines", "plain torch", "sync", "async", "ssp"]


def markdown(rows: Sequence[Row]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.scripts", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scripts, by file name")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as Markdown")
    arguments = parser.parse_args()
    names = [script.name for script in SCRIPTS]
    if unknown := {*(arguments.only or ())} - {*names}:
        parser.error(f"--only: no script {min(unknown)}, but {', '.join(names)}")
    scripts = [s for s in SCRIPTS if arguments.only is None or s.name in arguments.only]
    rows = []
    for script in scripts:
        started = time.monotonic()
        rows.append(row := measure(script))
        print("  ".join(row.cells), f" {time.monotonic() - started:.0f} s", flush=True)
        for problem in row.problems:
            print(f"FAILED {script.name}: {problem}", flush=True)
    if arguments.write:
        arguments.write.write_text(markdown(rows))
    failed = sum(bool(row.problems) for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
