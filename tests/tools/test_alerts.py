"""promtool accepts the files that deploy/ gives to Prometheus."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.certificates import write_files
from tests.support.prometheus_queries import ALERTS, DEPLOY, alert_queries

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)


def promtool(*args: str | Path) -> tuple[int, str]:
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_prometheus_configuration_is_valid(tmp_path: Path) -> None:
    """This includes the alert rules that it names. Promtool wants to see the credentials too."""
    write_files(tmp_path)
    tmp_path.joinpath("read.token").write_text("a token of sixteen or more characters")
    shutil.copy(ALERTS, tmp_path)
    config = tmp_path / "prometheus.yml"
    deployed = (DEPLOY / "prometheus.yml").read_text()
    config.write_text(deployed.replace("/credentials/", f"{tmp_path}/"))
    code, output = promtool("check", "config", "--lint=all", config)

    assert code == 0, output
    assert f"{len(alert_queries())} rules found" in output


def test_each_alert_fires_only_in_its_case() -> None:
    """alerts_test.yml has one case per alert and a healthy run."""
    cases = Path(__file__).with_name("alerts_test.yml")
    code, output = promtool("test", "rules", cases)

    assert code == 0, output
    missing = [
        query.where
        for query in alert_queries()
        if query.where.removeprefix("alert ") not in cases.read_text()
    ]
    assert not missing, f"{ALERTS.name} has alerts without a case"
