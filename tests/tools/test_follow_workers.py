"""deploy/follow-workers with a substitute for docker: which commands it gives, and when it ends."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DOCKER = """#!/usr/bin/env bash
# Plays one line of the file `answers` for each status: a number, `none`, `fails` or `refuses`.
cd "$(dirname "$0")"
echo "$*" >> calls
case "$*" in
  *" ps --quiet "*) [ -s answers ] && echo container; exit 0;;
  *" exec -T "*)
    answer=$(head -1 answers); sed -i 1d answers
    case $answer in
      fails) exit 1;;
      none) echo '{"workers_wanted": null}';;
      *) echo "{\\"workers_wanted\\": $answer}";;
    esac;;
  *" up "*) if [ -e up-fails ]; then rm up-fails; exit 1; fi;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the substitute, which comes first on PATH."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    return tmp_path


def follow(folder: Path, answers: Sequence[object]) -> list[str]:
    """Return the calls of `docker compose up` while the servers give these answers."""
    (folder / "answers").write_text("".join(f"{answer}\n" for answer in answers))
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FOLLOW_SECONDS": "0"}
    environment["COMPOSE"] = "docker compose -f some.yml"
    done = subprocess.run(
        [ROOT / "deploy" / "follow-workers", "worker", "server-0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text().splitlines()
    assert "compose -f some.yml exec -T server-0 ps-ctl --output json status" in calls
    for index, call in enumerate(calls):
        assert " up " not in call or " rm --force worker" in calls[index - 1]
    return [call.split()[-2] for call in calls if " up " in call]


def test_the_service_follows_the_number(folder: Path) -> None:
    assert follow(folder, ["none", 2, 2, 4, 4, 2, "none"]) == [
        "worker=2",
        "worker=4",
        "worker=2",
    ]


def test_a_server_that_does_not_answer_is_asked_again(folder: Path) -> None:
    assert follow(folder, [2, "fails", "fails", 3]) == ["worker=2", "worker=3"]


def test_a_scaling_that_fails_is_tried_again(folder: Path) -> None:
    (folder / "up-fails").touch()

    assert follow(folder, [3, 3, 3]) == ["worker=3", "worker=3"]
