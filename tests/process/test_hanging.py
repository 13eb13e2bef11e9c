"""A real run with a script that hangs while its process sends heartbeats."""

from pathlib import Path

from tests.support.programs import programs_in
from tests.support.settings_coverage import server_setting

HANGS_ONCE = """
import os, threading, torch, psworker
first = os.environ["PS_WORKER_RANK"] == "1" and os.environ["PS_WORKER_ATTEMPT"] == "0"
job = psworker.connect()
model = torch.nn.Linear(1, 1)
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
for number, (x,) in enumerate(job.batches((torch.ones(40, 1),), batch_size=4)):
    if first and number == 1:
        print("hangs", flush=True)
        threading.Event().wait()
    model(x).sum().backward()
    optimizer.step()
job.close()
"""


@server_setting("progress_timeout")
def test_a_hanging_worker_is_dropped_killed_and_restarted(tmp_path: Path) -> None:
    with programs_in(tmp_path) as programs:
        programs.script(HANGS_ONCE)

        run = programs.start("ps-run", "--workers", 2, "--progress-timeout", "2s", "train.py")

        run.wait_for("[w1] hangs")
        assert run.wait() == 0, run.output
        assert "--progress-timeout: its script made no call for " in run.output
        assert "w1 is killed: its script hangs (--progress-timeout)" in run.err
        assert "steps           10  (40 samples)" in run.out
