"""Soak test: real servers and workers, random faults, and a checker that reads all journals.

    python -m tests.chaos                           five minutes with a new seed, which is printed
    python -m tests.chaos --minutes 60 --seed 7     an hour of repeatable faults
    python -m tests.chaos --only counter-sync       one of the jobs
    python -m tests.chaos --dry-run --seed 7        print the fault schedule only

Exits with 1 if a rule was broken, and prints where the artefacts are.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tests.chaos import report, schedule, soak
from tests.chaos.checker import Finding
from tests.chaos.cluster import SoakJob
from tests.support.programs import BIN
from tests.support.small_disk import missing

CALIBRATION = 0.1
"""Share of a job's time for a run without faults, before the run with faults and again after it."""

LOST_CALLS = (
    "CoordinatorService.*=-1:0.2%:0.2%:0.2%,ParameterServerService.Exchange=-1:0.1%:0.1%:0.1%"
)


def main() -> int:
    # exit handlers end all processes
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = parse()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    runs = [
        soak_job
        for soak_job in planned_runs(options)
        if not options.only or soak_job.name in options.only
    ]
    seconds = options.minutes * 60 / len(runs)
    print(
        f"seed {options.seed}: {', '.join(job.name for job in runs)}, "
        f"{seconds:.0f} s each; artefacts in {folder}"
    )
    failed = [
        soak_job.name
        for soak_job in runs
        if not run_and_report(soak_job, folder / soak_job.name, seconds, options)
    ]
    if failed:
        print(f"FAILED: {', '.join(failed)}; artefacts in {folder}; again: --seed {options.seed}")
        return 1
    shutil.rmtree(folder)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument(
        "--gap", type=float, default=10.0, help="seconds between faults, on average"
    )
    parser.add_argument(
        "--goodput", type=float, default=0.8, help="least share of an undisturbed run's updates"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB")
    parser.add_argument(
        "--kinds", nargs="+", choices=get_args(schedule.Kind), default=[], metavar="FAULT"
    )
    parser.add_argument(
        "--durability", choices=("log", "snapshot"), default="log" if has_log() else "snapshot"
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("flags", nargs="*", help="more flags of every server, after --")
    return parser.parse_args()


def has_log() -> bool:
    """Return whether servers know --durability."""
    return (
        "--durability"
        in subprocess.run([BIN / "ps-server", "--help"], capture_output=True, text=True).stdout
    )


def planned_runs(options: argparse.Namespace) -> list[SoakJob]:
    flags = ("--lease", "3s", "--snapshot-every", "2s", *options.flags)
    if has_log():
        flags += ("--durability", options.durability)
    return [
        SoakJob("counter", "sync", flags, faults=LOST_CALLS, seed=options.seed),
        SoakJob("counter", "async", flags, faults=LOST_CALLS, seed=options.seed),
        SoakJob("digits", "sync", flags, faults=LOST_CALLS, seed=options.seed, epochs=10_000),
        SoakJob(
            "charlm",
            "ssp",
            (*flags, "--staleness", "2"),
            faults=LOST_CALLS,
            seed=options.seed,
            epochs=10_000,
        ),
    ]


def kinds(options: argparse.Namespace, folder: Path) -> Sequence[schedule.Kind]:
    """Return the requested kinds of faults, without full disks if no small disk can be mounted."""
    chosen = options.kinds or get_args(schedule.Kind)
    if reason := missing(folder):
        print(f"no full disks: {reason}")
        chosen = [kind for kind in chosen if kind != "full disk"]
    return chosen


def run_and_report(
    soak_job: SoakJob, folder: Path, seconds: float, options: argparse.Namespace
) -> bool:
    """Run one job without, with and without faults, print its table, and return whether it passed.

    Two runs without faults: a shared machine may change its speed meanwhile.
    """
    folder.mkdir()
    disturbed = seconds * (1 - 2 * CALIBRATION)
    seed = f"{options.seed} {soak_job.name}"
    faults = schedule.draw_faults(
        seed, disturbed, soak_job.shards, soak_job.workers, options.gap, kinds(options, folder)
    )
    print("\n".join([f"\n{soak_job.name}, seed {options.seed}", *map(str, faults)]), flush=True)
    if options.dry_run:
        return True
    before = soak.run(soak_job, folder / "undisturbed", seconds * CALIBRATION)
    faulty = soak.run(soak_job, folder / "disturbed", disturbed, faults)
    after = soak.run(soak_job, folder / "undisturbed-again", seconds * CALIBRATION)
    undisturbed = (before.updates_per_second + after.updates_per_second) / 2
    if report.goodput(faulty, undisturbed) < options.goodput:
        faulty.findings.append(Finding("goodput", f"below {options.goodput:.0%}"))
    print(report.table(faulty, undisturbed))
    findings = [*before.findings, *after.findings]
    _print_findings(findings)
    return not faulty.findings and not findings


def _print_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"  FAILED undisturbed, {finding.rule}: {finding.text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
