"""`ps-ctl doctor` reports problems of a machine with a remedy; a healthy machine passes."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from pscommon.wire.endpoint import Endpoint
from psworker.ctl import checks
from psworker.ctl.cli import main
from tests.support.environments import SERVERS, WORKERS, config
from tests.support.ports import free_port

Output = pytest.CaptureFixture[str]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FRAME_COUNT", 4)
    monkeypatch.setattr(checks, "CALL_COUNT", 5)


def test_a_healthy_machine_passes(tmp_path: Path, capsys: Output, quick: None) -> None:
    code = main(
        ["doctor", "--port", str(free_port()), "--data-dir", str(tmp_path), "--output", "json"]
    )
    findings = json.loads(capsys.readouterr().out)

    assert code == 0
    assert not [finding for finding in findings if finding["state"] == "problem"]
    assert {
        "python",
        "packages",
        "torch",
        "devices",
        "cores",
        "memory",
        "/dev/shm",
        "loopback gRPC",
    } <= {finding["check"] for finding in findings}
    assert list(tmp_path.iterdir()) == []


def test_problems_are_shown_with_a_remedy_and_exit_code_1(
    tmp_path: Path, capsys: Output, quick: None
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        code = main(["doctor", "--port", str(taken), "--data-dir", str(tmp_path / "missing")])
    text = capsys.readouterr().out

    assert code == 1
    assert f"port {taken}" in text
    assert "Address already in use" in text
    assert "set --bind HOST:PORT" in text
    assert "No such file or directory" in text


def test_several_ports_are_checked(tmp_path: Path, capsys: Output, quick: None) -> None:
    ports = [free_port(), free_port()]
    flags = [word for port in ports for word in ("--port", str(port))]
    assert main(["doctor", *flags, "--data-dir", str(tmp_path), "--output", "json"]) == 0

    assert [f["check"] for f in json.loads(capsys.readouterr().out)][6:8] == [
        f"port {port}" for port in ports
    ]


def test_the_data_directory_of_the_environment_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, quick: None
) -> None:
    monkeypatch.setenv("PS_DATA_DIR", str(tmp_path))
    main(["doctor", "--port", str(free_port())])

    assert f"folder {tmp_path}" in capsys.readouterr().out


def findings_of(monkeypatch: pytest.MonkeyPatch, **environ: str) -> list[checks.Finding]:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    return [checks.environment("server"), checks.environment("worker")]


def test_the_environment_of_an_engine_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {found.text for found in findings_of(monkeypatch)} == {
        "no engine detected; the flags say all"
    }
    text = config("worker", 1, ps=SERVERS, worker=WORKERS)
    server, worker = findings_of(monkeypatch, TF_CONFIG=text, JOB_COMPLETION_INDEX="1")

    assert server == checks.Finding("ok", "TF_CONFIG says that this is no server")
    assert worker.text == (
        f"TF_CONFIG (TF_CONFIG) wins: worker 1 of 2; servers {', '.join(SERVERS)}. Then indexed "
        "Job (JOB_COMPLETION_INDEX): worker 1"
    )


def test_environments_that_contradict_each_other_are_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = config("worker", 1, ps=SERVERS, worker=WORKERS)
    _, worker = findings_of(monkeypatch, TF_CONFIG=text, JOB_COMPLETION_INDEX="2")

    assert (worker.state, "--worker-rank" in worker.remedy) == ("problem", True)


def test_a_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    # the default of Docker
    monkeypatch.setattr(
        checks.shutil,
        "disk_usage",
        lambda path: checks.shutil._ntuple_diskusage(64 << 20, 0, 64 << 20),
    )
    finding = checks.shared_memory()

    assert (finding.state, "shm-size" in finding.remedy) == ("warning", True)


def test_a_missing_shared_memory_is_a_warning(tmp_path: Path) -> None:
    assert checks.shared_memory(tmp_path / "shm").state == "warning"


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:  4000000 kB\nMemAvailable:  500000 kB\nHugePages_Total:  0\n"
    )
    finding = checks.memory(tmp_path / "meminfo")

    assert finding.state == "warning"
    assert finding.text == "512 MB available of 4.1 GB"


def test_unknown_memory_is_a_warning(tmp_path: Path) -> None:
    assert checks.memory(tmp_path / "meminfo").state == "warning"


def test_a_loopback_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ECHO", "/not/there")
    monkeypatch.setattr(checks._Echo, "service", lambda self, details: None)
    finding = checks.loopback()

    assert finding.state == "problem"
    assert finding.remedy


def test_a_slow_loopback_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "measure", lambda: checks.RpcSpeed(6.0, 1000.0))

    assert checks.loopback().state == "warning"


def test_the_loopback_check_transfers_bytes(quick: None) -> None:
    speed = checks.measure()

    assert 0 < speed.round_trip < 1000
    assert speed.rate > 1


def test_a_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PACKAGES", ("no-such-package-at-all",))
    finding = checks.packages()

    assert (finding.state, finding.text) == ("problem", "no-such-package-at-all is not installed")


def test_a_torch_installation_that_cannot_be_imported_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(checks.sys.modules, "torch", None)

    assert [checks.torch().state, checks.devices().state] == ["problem", "problem"]


def test_a_gpu_that_cannot_be_used_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(index: int) -> str:
        raise RuntimeError(
            "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors "
            "might be"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", busy)
    finding = checks.devices()

    assert (finding.state, finding.text.count("\n")) == ("problem", 0)
    assert "busy or unavailable" in finding.text
    assert "--device cpu" in finding.remedy


def test_the_loopback_check_leaves_no_port_open(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []
    listen = checks.listen_grpc

    def noting(*arguments: Any) -> Any:
        server, address = listen(*arguments)
        ports.append(Endpoint(address).port)
        return server, address

    monkeypatch.setattr(checks, "listen_grpc", noting)
    checks.measure()

    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", ports[0])) != 0
