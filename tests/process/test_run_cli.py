"""ps-run as a process that gets signals; the servers and the connections to them are stubs."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.run_bench import LIMIT, Bench, bench_in


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with bench_in(tmp_path) as bench:
        yield bench


def pids(text: str) -> list[int]:
    """Return the PIDs that processes have printed."""
    return [
        int(line.split()[2])
        for line in text.splitlines()
        if line.split()[1:2] in (["server"], ["worker"])
    ]


def has_exited(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], LIMIT)[0])
    finally:
        os.close(handle)


GOOD = 'import os, sys; print("worker", os.getpid(), os.environ["PS_WORKER_RANK"], sys.argv[1:])'
WAITING = GOOD + "\nimport signal\nsignal.pause()"


def test_a_successful_run_writes_summary_and_output(bench: Bench) -> None:
    summary = bench.folder / "summary.json"

    result = bench.run(
        "--servers", "2", "--workers", "2", "--summary", str(summary), bench.script(GOOD)
    )

    assert result.returncode == 0, result.stderr
    content = json.loads(summary.read_text())
    seconds = content.pop("seconds")
    assert 0 < seconds < LIMIT
    assert content == {
        "status": "done",
        "training": "",
        "trainings_finished": [],
        "steps": 14,
        "samples": 448,
        "this_run": {"steps": 14, "samples": 448, "resumed_version": None},
        "policy": "sync",
        "staleness": None,
        "servers": 2,
        "workers": 2,
        "restarts": 0,
        "weights_sha256": "ab" * 32,
        "metrics": {"accuracy": 0.97},
        "history": {},
        "saved": None,
    }
    assert "accuracy        0.97" in result.stdout
    assert "ab" * 32 in result.stdout
    for prefix in ("[s0] server", "[s1] server", "[w0] worker", "[w1] worker"):
        assert prefix in result.stdout
    assert len(pids(result.stdout)) == 4
    assert all(map(has_exited, pids(result.stdout)))
    assert list(bench.temporary.iterdir()) == []


def test_an_unwritable_summary_fails_the_run_after_printing_results(
    bench: Bench,
) -> None:
    (bench.folder / "there").mkdir()
    script = bench.script(GOOD + "\nos.rmdir('there')")

    result = bench.run("--summary", "there/summary.json", script)

    assert result.returncode == 1
    assert "--summary there/summary.json could not be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert "ab" * 32 in result.stdout


def test_arguments_after_the_script_belong_to_the_script(bench: Bench) -> None:
    args = ["--policy", "async", "--", "--help", "-m", "", "--servers=7", "a b"]

    result = bench.run("--policy", "sync", bench.script(GOOD), *args)

    assert result.returncode == 0, result.stderr
    assert f"0 {args}" in result.stdout
    assert "0/1 sync" in result.stdout


def test_an_unknown_variable_is_reported_once(bench: Bench) -> None:
    """Only ps-run reports it, not each process."""
    result = bench.run(bench.script(GOOD), PS_MIN_WORKER="3")

    warnings = [line for line in result.stderr.splitlines() if "PS_MIN_WORKER" in line]
    assert warnings == ["[run] no setting is called PS_MIN_WORKER; did you mean PS_MIN_WORKERS?"]
    assert "[run] 1 server, 1 worker on " in result.stderr


def test_a_module_can_be_run(bench: Bench) -> None:
    bench.script(GOOD, "my_train.py")

    result = bench.run("-m", "my_train", "--lr", "1")

    assert result.returncode == 0, result.stderr
    assert "0 ['--lr', '1']" in result.stdout


def test_a_script_exception_fails_the_run_with_one_traceback(bench: Bench) -> None:
    script = bench.script(GOOD + "\nraise ValueError('bad data')")
    summary = bench.folder / "summary.json"

    result = bench.run("--workers", "2", "--summary", str(summary), script)

    output = result.stdout + result.stderr
    assert result.returncode == 1
    assert output.count("Traceback (most recent call last)") == 1
    assert output.count("ValueError: bad data") == 1
    assert "first failure: w" in output
    content = json.loads(summary.read_text())
    assert content["status"] == "failed"
    assert content["error"]["exit_code"] == 1
    assert content["error"]["process"] in ("w0", "w1")
    assert all(map(has_exited, pids(output)))


def test_a_failed_run_leaves_its_logs_and_prints_their_path(bench: Bench) -> None:
    result = bench.run(bench.script(GOOD + "\nraise ValueError('bad data')"))

    (log,) = [line.split("log: ")[1] for line in result.stderr.splitlines() if "log: " in line]
    assert "ValueError: bad data" in Path(log).read_text()
    (folder,) = bench.temporary.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["s0.log", "w0.log"]


def test_log_dir_contains_one_file_per_process(bench: Bench) -> None:
    logs = bench.folder / "a" / "b"

    for _ in range(2):  # the second run replaces the files of the first
        assert (
            bench.run("--workers", "2", "--log-dir", str(logs), bench.script(GOOD)).returncode == 0
        )

    assert sorted(path.name for path in logs.iterdir()) == ["s0.log", "w0.log", "w1.log"]
    assert (logs / "w1.log").read_text().count("worker") == 1


@pytest.mark.parametrize("code", [10, 12])
def test_a_failed_server_is_reported_with_exit_code_and_remedy(bench: Bench, code: int) -> None:
    result = bench.run("--servers", "2", bench.script(WAITING), BROKEN_SERVER="1/2", CODE=str(code))

    assert result.returncode == code
    assert "first failure: s1" in result.stderr
    assert f"s1 exited with {code}: " in result.stderr
    assert "remedy: " in result.stderr
    assert all(map(has_exited, pids(result.stdout)))


def test_a_killed_worker_is_restarted(bench: Bench) -> None:
    once = "import os, pathlib\nmark = pathlib.Path('mark')\n"
    once += "if not mark.exists():\n    mark.touch()\n    os.kill(os.getpid(), 9)\n"
    summary = bench.folder / "summary.json"

    result = bench.run("--summary", str(summary), bench.script(once + GOOD))

    assert result.returncode == 0, result.stderr
    assert json.loads(summary.read_text())["restarts"] == 1
    assert "w0 was killed by SIGKILL; restart 1 of at most 3" in result.stderr


def test_max_restarts_limits_restarts(bench: Bench) -> None:
    result = bench.run("--max-restarts", "0", bench.script("import os; os.kill(os.getpid(), 9)"))

    assert result.returncode == 137
    assert "w0 was killed by SIGKILL" in result.stderr


def test_unreadable_weights_are_reported(bench: Bench) -> None:
    (bench.folder / "no-model").touch()

    result = bench.run(bench.script(GOOD))

    assert result.returncode == 0
    assert "no worker has registered a model" in result.stderr
    assert "unknown: no worker has registered a model" in result.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_processes_and_removes_the_folder(
    bench: Bench, number: signal.Signals, code: int
) -> None:
    summary = bench.folder / "summary.json"
    process = bench.popen(
        "--servers", "2", "--workers", "2", "--summary", str(summary), bench.script(WAITING)
    )
    seen = wait_for_workers(process, 2)

    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)

    assert process.returncode == code
    all_pids = pids(seen + out)
    assert len(all_pids) == 4
    assert all(map(has_exited, all_pids))
    assert "Traceback" not in out + err
    assert json.loads(summary.read_text())["status"] == "interrupted"
    assert list(bench.temporary.iterdir()) == []


def test_a_second_ctrl_c_kills_processes_that_ignore_the_first(bench: Bench) -> None:
    ignoring = (
        "import signal; signal.signal(15, lambda *_: print('worker', 0, 'no', flush=True))\n" + GOOD
    )
    process = bench.popen("--grace", "1h", bench.script(ignoring + "\nwhile True: signal.pause()"))
    seen = wait_for_workers(process, 1)

    process.send_signal(signal.SIGINT)
    wait_for_workers(process, 1)  # the handler of the first signal ran
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT)

    assert process.returncode == 130
    assert all(map(has_exited, pids(seen)))
    assert list(bench.temporary.iterdir()) == []
    assert "Traceback" not in out


LOUD = "for number in range(200_000): print('x' * 100, number)"


def test_output_that_stdout_cannot_encode_is_escaped(bench: Bench) -> None:
    script = bench.script(
        "import sys; sys.stdout.reconfigure(encoding='utf-8')\nprint('a \u2192 b')\n" + GOOD
    )

    result = bench.run(script, PYTHONIOENCODING="latin-1")

    assert result.returncode == 0, result.stderr
    assert "[w0] a \\u2192 b\n" in result.stdout


def test_a_closed_stdout_does_not_end_the_run(bench: Bench) -> None:
    process = bench.popen(bench.script(GOOD + "\n" + LOUD))
    wait_for_workers(process, 1)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None

    _, err = process.communicate(timeout=LIMIT)

    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_signals_take_effect_while_stdout_is_not_read(bench: Bench) -> None:
    """The pipe, the queue and the pipes of the workers are then full or nearly full."""
    process = bench.popen(bench.script(GOOD + "\n" + LOUD + "\nimport signal\nsignal.pause()"))
    seen = wait_for_workers(process, 1)

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=LIMIT) == 143
    assert all(map(has_exited, pids(seen)))


def test_a_late_reader_gets_the_complete_output(bench: Bench) -> None:
    process = bench.popen(
        "--summary", "summary.json", bench.script(GOOD + "\n" + LOUD.replace("200", "20"))
    )
    out = wait_for_workers(process, 1)
    assert process.stdout is not None
    while not (bench.folder / "summary.json").exists():
        select.select([], [], [], 0.05)

    out += process.stdout.read()

    assert process.wait(timeout=LIMIT) == 0
    assert out.count("[w0] xxx") == 20_000
    assert "weights sha256" in out.splitlines()[-1]


def test_a_process_that_ignores_sigterm_is_killed_after_grace(bench: Bench) -> None:
    ignoring = (
        "import signal; signal.signal(15, signal.SIG_IGN)\n" + GOOD + "\nwhile True: signal.pause()"
    )
    process = bench.popen("--grace", "300ms", bench.script(ignoring))
    seen = wait_for_workers(process, 1)

    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT)

    assert process.returncode == 130
    assert 0.3 <= time.monotonic() - began < LIMIT / 2
    assert all(map(has_exited, pids(seen)))


def test_killing_ps_run_ends_all_its_processes(bench: Bench) -> None:
    process = bench.popen("--servers", "2", "--workers", "2", bench.script(WAITING))
    seen = wait_for_workers(process, 2)

    process.kill()
    out, _ = process.communicate(timeout=LIMIT)

    all_pids = pids(seen + out)
    assert len(all_pids) == 4
    assert all(map(has_exited, all_pids))


USAGE = {
    "no script": ([], "Missing argument"),
    "no such script": (["nowhere.py"], "cannot run nowhere.py"),
    "ssp without a bound": (["--policy", "ssp", "train.py"], "policy ssp needs a bound"),
    "a bound without ssp": (["--staleness", "2", "train.py"], "excludes `--staleness 2`"),
    "no servers": (["--servers", "0", "train.py"], "--servers"),
    "more needed than there are": (
        ["--min-workers", "3", "--workers", "2", "train.py"],
        "--min-workers 3",
    ),
    "summary into nowhere": (["--summary", "no/where.json", "train.py"], "--summary no/where.json"),
    "summary below a file": (
        ["--summary", "train.py/where.json", "train.py"],
        "--summary train.py/where.json",
    ),
    "log folder that is a file": (["--log-dir", "train.py", "train.py"], "--log-dir"),
    "curves below a file": (
        ["--tensorboard", "train.py/curves", "train.py"],
        "`--tensorboard train.py/curves` cannot be written: Not a directory",
    ),
    "no ports for all": (["--metrics-bind", "127.0.0.1:65535", "train.py"], "use port 65536"),
    "metrics for other machines": (
        ["--metrics-bind", "0.0.0.0:9000", "train.py"],
        "`--insecure`",
    ),
    "log file that is a folder": (
        ["--log-dir", ".", "--workers", "2", "train.py"],
        "w1.log is a folder",
    ),
    "unknown flag": (["--polcy", "sync", "train.py"], "--policy"),
}


@pytest.mark.parametrize(("args", "text"), USAGE.values(), ids=USAGE.keys())
def test_usage_errors_are_reported_before_any_process_starts(
    bench: Bench, args: list[str], text: str
) -> None:
    bench.script(GOOD)
    (bench.folder / "w1.log").mkdir()

    result = bench.run(*args)

    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(bench.temporary.iterdir()) == []


def test_ps_local_is_refused(bench: Bench) -> None:
    result = bench.run(bench.script(GOOD), PS_LOCAL="1")

    assert result.returncode == 2
    assert "PS_LOCAL excludes ps-run" in result.stderr
    assert result.stdout == ""


def test_help_shows_examples(bench: Bench) -> None:
    result = bench.run("--help")

    assert result.returncode == 0
    assert "ps-run --servers 2 --workers 2 train.py" in result.stdout


def wait_for_workers(process: subprocess.Popen[str], count: int) -> str:
    """Read the output of ps-run until `count` workers have printed their PID; return it."""
    assert process.stdout is not None
    seen = ""
    while len([line for line in seen.splitlines() if "] worker " in line]) < count:
        line = process.stdout.readline()
        assert line, f"ps-run ended early: {process.stderr.read() if process.stderr else ''}"
        seen += line
    return seen
