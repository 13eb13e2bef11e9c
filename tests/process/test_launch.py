"""`psworker.launch` in scripts and in the kernel of a notebook."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import Program, Programs, programs_in, wait_for_exit

# the process has computed with threads and autograd before: its copies have neither
BEFORE = """
import os, signal, threading, torch, psworker

data = torch.utils.data.TensorDataset(torch.ones(64, 3))
(torch.randn(600, 600) @ torch.randn(600, 600)).sum()
torch.nn.Linear(3, 1)(torch.ones(4, 3)).sum().backward()

class Broken(Exception):
    def __init__(self, rank, why):
        super().__init__(f"worker {rank}: {why}")

def train(fall=lambda job: None):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    with psworker.connect(wait_timeout=60) as job:
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        print(f"worker {job.rank} of {job.workers}", flush=True)
        for (x,) in job.batches(data, batch_size=2):
            fall(job)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        job.report(accuracy=0.5)

def fail(job):
    if job.rank == 1:
        raise Broken(job.rank, "no data")

def fall(job):
    if job.rank == 1 and not os.path.exists("fallen"):
        open("fallen", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)

def hang(job):
    print("hangs", flush=True)
    threading.Event().wait()
"""
WORKERS = ["[w0] worker 0 of 2", "[w1] worker 1 of 2"]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def start(programs: Programs, code: str) -> Program:
    programs.script(BEFORE + code)
    return programs.start("python", "train.py")


def test_a_function_trains_twice(programs: Programs) -> None:
    run = start(
        programs,
        """
for _ in range(2):
    summary = psworker.launch(train, servers=2, workers=2)
    print("end", summary["status"], summary["samples"], summary["metrics"], flush=True)
""",
    )

    assert run.wait(120) == 0, run.output
    assert run.out.count("end done 64 {'accuracy': 0.5}") == 2
    for line in WORKERS:
        assert run.out.count(line) == 2
    assert programs.alive == []


def test_a_killed_worker_starts_again(programs: Programs) -> None:
    code = """
from functools import partial
summary = psworker.launch(partial(train, fall), servers=1, workers=2)
print("end", summary["samples"], summary["restarts"], flush=True)
"""
    run = start(programs, code)

    assert run.wait() == 0, run.output
    assert "end 64 1" in run.out


def test_the_exception_of_a_worker_is_raised(programs: Programs) -> None:
    code = """
try:
    psworker.launch(lambda: train(fail), servers=1, workers=2)
except Broken as error:
    print("caught", error, "| in fail" in "".join(error.__notes__).replace(", in", "| in"))
"""
    run = start(programs, code)

    assert run.wait() == 0, run.output
    assert "caught worker 1: no data True" in run.out


def test_ctrl_c_ends_all_processes(programs: Programs) -> None:
    run = start(programs, "psworker.launch(lambda: train(hang), servers=1, workers=2)")
    run.wait_for("hangs", times=2)
    run.send(signal.SIGINT)

    assert run.wait() == -signal.SIGINT, run.output
    assert "KeyboardInterrupt" in run.err
    assert programs.alive == []


def test_all_processes_end_with_the_script(programs: Programs) -> None:
    run = start(programs, "psworker.launch(lambda: train(hang), servers=1, workers=2)")
    run.wait_for("hangs", times=2)
    others = [pid for pid in programs.alive if pid != run.pid]
    run.send(signal.SIGKILL)

    assert len(others) >= 4  # ps-run, a server, two workers
    assert all(wait_for_exit(pid) for pid in others)


@pytest.fixture
def kernel(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a manager and a client of a new kernel, in the folder of the test."""
    manager = pytest.importorskip("jupyter_client.manager", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    monkeypatch.chdir(programs.folder)
    running, client = manager.start_new_kernel(kernel_name="python3")
    yield running, client
    client.stop_channels()
    running.shutdown_kernel(now=True)


def cell(kernel: Any, code: str, interrupt_at: str = "\0") -> tuple[str, str]:
    """Run a cell; return its output and the name of its exception."""
    manager, client = kernel
    texts = []

    def show(message: Any) -> None:
        text = message["content"].get("text", "")
        texts.append(text)
        if interrupt_at in text:
            manager.interrupt_kernel()

    reply = client.execute_interactive(code, output_hook=show, timeout=120)["content"]
    return "".join(texts), reply.get("ename", "")


def test_the_cells_of_a_notebook(programs: Programs, kernel: Any) -> None:
    """A run, an exception, an interrupt, and a run after them, in one kernel."""
    assert cell(kernel, BEFORE) == ("", "")
    launch = "psworker.launch({}, servers=1, workers=2)['samples']"
    for code in (f"print('end', {launch.format('train')})", f"{launch.format('train')}"):
        output, error = cell(kernel, code)
        assert error == ""
        assert all(line in output for line in WORKERS), output
    output, error = cell(kernel, launch.format("lambda: train(fail)"))
    assert error == "Broken", output
    output, error = cell(kernel, launch.format("lambda: train(hang)"), interrupt_at="hangs")
    assert error == "KeyboardInterrupt", output
    output, error = cell(kernel, f"print('end', {launch.format('train')})")
    assert "end 64" in output
    assert error == ""


def test_a_notebook_runs_from_its_first_to_its_last_cell(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    nbformat = pytest.importorskip("nbformat.v4", reason="needs nbclient")
    monkeypatch.chdir(programs.folder)
    code = [BEFORE, "summary = psworker.launch(train)", "assert summary['samples'] == 64"]
    notebook = nbformat.new_notebook(cells=[nbformat.new_code_cell(text) for text in code])

    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()

    outputs = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert all(line in outputs for line in WORKERS)
