"""Runs the benchmarks: contenders take turns, results become JSON, a page and pictures.

    python -m benchmarks                          everything, into benchmarks/results (half an hour)
    python -m benchmarks --only push_pull tail    some works; results of the others stay as they are
    python -m benchmarks --scale quick            the main ratios in two minutes; writes if --output

TensorFlow takes part in a full run where .venv-tf has it (make bench-tf), or --tensorflow names
a Python that does.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record, report
from benchmarks.bars import judge
from benchmarks.scale import SCALES, Scale
from benchmarks.speaker import ROOT
from benchmarks.works import WORKS
from benchmarks.works.work import Work

RESULTS = ROOT / "benchmarks/results"
TENSORFLOW = ROOT / ".venv-tf/bin/python"


def main() -> int:
    options = parse()
    output = options.output or (RESULTS if options.scale == "full" else None)
    with tempfile.TemporaryDirectory() as folder:
        failed = run(chosen(options), scale(options), output or Path(folder))
        results = record.load(output or Path(folder))
        print(
            report.bars_table(
                verdict for verdict in judge(results) if verdict.bar.result in ran(options)
            )
        )
        if output:
            print(f"\n{report.write(results, output)}")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument(
        "--only", nargs="+", choices=[work.name for work in WORKS], metavar="WORK", default=[]
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tensorflow", type=Path, default=TENSORFLOW, metavar="PYTHON")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: benchmarks/results, for a full run"
    )
    return parser.parse_args()


def scale(options: argparse.Namespace) -> Scale:
    found = SCALES[options.scale]
    if options.rounds:
        found = dataclasses.replace(found, rounds=options.rounds)
    if options.tensorflow.exists() and found.name == "full":
        found = dataclasses.replace(found, tensorflow=str(options.tensorflow))
    return found


def chosen(options: argparse.Namespace) -> list[Work]:
    """Those asked for; of a quick run only the quick ones."""
    if options.only:
        return [work for work in WORKS if work.name in options.only]
    return [work for work in WORKS if work.quick or options.scale != "quick"]


def ran(options: argparse.Namespace) -> set[str]:
    return {work.name for work in chosen(options)}


def run(works: list[Work], wanted: Scale, output: Path) -> list[str]:
    """Each work's result into `output` as soon as it is there. Returns the works that failed."""
    failed = []
    for number, work in enumerate(works, 1):
        title, began = f"[{number}/{len(works)}] {work.name}", time.monotonic()
        try:
            work.run(wanted, lambda text, title=title: show(f"{title}: {text}")).save(output)  # type: ignore[misc]
            show(f"{title}: {time.monotonic() - began:.0f} s\n")
        except RuntimeError as error:
            failed.append(work.name)
            show(f"{title}: FAILED: {error}\n")
    return failed


def show(text: str) -> None:
    """Progress, on one line of a terminal, on lines of its own elsewhere; stdout is for the
    results.
    """
    end = "" if sys.stderr.isatty() and not text.endswith("\n") else "\n"
    print(
        ("\r\x1b[K" if sys.stderr.isatty() else "") + text.rstrip("\n"),
        end=end,
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
