"""The soak: real servers and workers, random faults, and a checker that reads everybody's journal.

    python -m tests.chaos                           five minutes with a new seed, which is printed
    python -m tests.chaos --minutes 60 --seed 7     an hour of faults that can be had again
    python -m tests.chaos --only counter-sync       one of the jobs
    python -m tests.chaos --dry-run --seed 7        what would happen when

Ends with 1 if a rule was broken, and says where the artefacts are.
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

from tests.chaos import act, report, schedule
from tests.chaos.checker import Finding
from tests.chaos.cluster import Act
from tests.support.programs import BIN
from tests.support.small_disk import missing

CALIBRATION = 0.1
"""Share of an act's time that goes into a run without faults, before the disturbed one, and
again after it.
"""

LOST_CALLS = (
    "CoordinatorService.*=-1:0.2%:0.2%:0.2%,ParameterServerService.Exchange=-1:0.1%:0.1%:0.1%"
)


def main() -> int:
    # nothing may stay behind
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = parse()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    acts = [each for each in playbill(options) if not options.only or each.name in options.only]
    seconds = options.minutes * 60 / len(acts)
    print(
        f"seed {options.seed}: {', '.join(each.name for each in acts)}, {seconds:.0f} s each; "
        f"artefacts in {folder}"
    )
    failed = [each.name for each in acts if not played(each, folder / each.name, seconds, options)]
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
    parser.add_argument("--only", nargs="+", default=[], metavar="ACT")
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
    """Do the servers know --durability?"""
    return (
        "--durability"
        in subprocess.run([BIN / "ps-server", "--help"], capture_output=True, text=True).stdout
    )


def playbill(options: argparse.Namespace) -> list[Act]:
    flags = ("--lease", "3s", "--snapshot-every", "2s", *options.flags)
    if has_log():
        flags += ("--durability", options.durability)
    return [
        Act("counter", "sync", flags, faults=LOST_CALLS, seed=options.seed),
        Act("counter", "async", flags, faults=LOST_CALLS, seed=options.seed),
        Act("digits", "sync", flags, faults=LOST_CALLS, seed=options.seed, epochs=10_000),
        Act(
            "charlm",
            "ssp",
            (*flags, "--staleness", "2"),
            faults=LOST_CALLS,
            seed=options.seed,
            epochs=10_000,
        ),
    ]


def kinds(options: argparse.Namespace, folder: Path) -> Sequence[schedule.Kind]:
    """Those that were asked for; where no disk can be made, without that one."""
    chosen = options.kinds or get_args(schedule.Kind)
    if reason := missing(folder):
        print(f"no full disks: {reason}")
        chosen = [kind for kind in chosen if kind != "full disk"]
    return chosen


def played(each: Act, folder: Path, seconds: float, options: argparse.Namespace) -> bool:
    """One act, undisturbed, disturbed and undisturbed again, and its table. Was it all right?

    Twice, because a machine that others use, too, is not as fast at the end of an act as it was
    at its beginning.
    """
    folder.mkdir()
    disturbed = seconds * (1 - 2 * CALIBRATION)
    seed = f"{options.seed} {each.name}"
    faults = schedule.drawn(
        seed, disturbed, each.shards, each.workers, options.gap, kinds(options, folder)
    )
    print("\n".join([f"\n{each.name}, seed {options.seed}", *map(str, faults)]), flush=True)
    if options.dry_run:
        return True
    before = act.run(each, folder / "undisturbed", seconds * CALIBRATION)
    stormy = act.run(each, folder / "disturbed", disturbed, faults)
    after = act.run(each, folder / "undisturbed-again", seconds * CALIBRATION)
    undisturbed = (before.updates_per_second + after.updates_per_second) / 2
    if report.goodput(stormy, undisturbed) < options.goodput:
        stormy.findings.append(Finding("goodput", f"below {options.goodput:.0%}"))
    print(report.table(stormy, undisturbed))
    calm = [*before.findings, *after.findings]
    _show_calm(calm)
    return not stormy.findings and not calm


def _show_calm(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"  FAILED undisturbed, {finding.rule}: {finding.text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
