"""The benchmark page and its plots, from invented results."""

from pathlib import Path

from benchmarks import record, report
from benchmarks.bars import BARS
from benchmarks.setup import BYTES_PER_MEGABYTE
from benchmarks.works import decisions
from benchmarks.works.entrants import STREAM, TENSORFLOW, ours, team
from benchmarks.works.sizes import sized
from tests.support.benchmark_results import result

GRPC, LANE = ours("grpc"), ours("stream")


def push_pull() -> record.Result:
    records = {
        GRPC: {"seconds": [0.3, 0.2]},
        STREAM: {"seconds": [0.1, 0.1]},
        LANE: {"seconds": [0.1, 0.15]},
    }
    return result("push_pull", records, skipped={TENSORFLOW: "no TensorFlow here"})


def test_missed_limits_are_shown() -> None:
    """They appear with their spread in the tables of limits and of contenders."""
    page = report.text({"push_pull": push_pull()}, [])

    assert f"| 1 | {GRPC} | {STREAM} | 1.25 | 2.50 (2.00 to 3.00) | **no** |" in page
    assert f"| 16 | {LANE} | {GRPC} | 0.9 | 0.50 (0.33 to 0.75) | yes |" in page
    assert f"| {GRPC} | 250 (200 to 300) | – | – |" in page


def test_missing_results_show_a_reason() -> None:
    page = report.text({"push_pull": push_pull()}, [])

    assert f"| 1 | {GRPC} | {TENSORFLOW} | 0.8 | no TensorFlow here | – |" in page
    assert f"| {TENSORFLOW} | not measured: no TensorFlow here |" in page


def test_the_page_names_machine_and_versions() -> None:
    page = report.text({"push_pull": push_pull()}, [])

    assert (
        "2 rounds, 2026-01-02T03:04:05+00:00; processor a processor, cores 2, torch 2.13.0." in page
    )


def test_table_rows_have_as_many_cells_as_the_heading() -> None:
    lines = report.text({"push_pull": push_pull()}, []).splitlines()
    counts = [line.count("|") for line in lines if line.startswith("|")]
    rows = len(BARS) + 2

    assert set(counts[:rows]) == {7}
    assert set(counts[rows:]) == {5}


def test_the_page_shows_all_plots(tmp_path: Path) -> None:
    shown = ("data", "pull", "compute", "push", "wait", "apply")
    results = {
        "sizes_small": result(
            "sizes_small",
            {sized(GRPC, size * BYTES_PER_MEGABYTE): {"seconds": [0.1 * size]} for size in (1, 4)},
        ),
        "decisions": result(
            "decisions",
            {decisions.name("async", *size): {"decision": [1e-5]} for size in decisions.SIZES},
        ),
        "growth": result(
            "growth", {team("grpc", count): {"server_cpu": [0.01]} for count in (1, 2)}
        ),
        "phases": result("phases", {team("grpc", 1): {f"phase.{phase}": [0.1] for phase in shown}}),
    }

    page = report.write(results, tmp_path).read_text()

    for name in ("sizes.png", "growth.png", "decisions.png", "phases.png"):
        assert f"({name})" in page
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_no_plots_without_results(tmp_path: Path) -> None:
    report.write({"push_pull": push_pull()}, tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_saved_results_load_unchanged(tmp_path: Path) -> None:
    push_pull().save(tmp_path)

    assert record.load(tmp_path) == {"push_pull": push_pull()}
