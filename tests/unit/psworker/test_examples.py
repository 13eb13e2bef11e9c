"""The examples train. Here without servers; tests that start servers run them under every
policy.
"""

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import psworker
from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.examples import charlm, digits, early_stopping, gpt2, linear, resnet
from psworker.job import Job

Run = Callable[..., LocalClient]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch that spin are slow beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs main() of an example with arguments in a new job."""

    def run(main: Callable[[], None], *args: str) -> LocalClient:
        client = LocalClient()
        monkeypatch.setattr(sys, "argv", ["example", *args])
        monkeypatch.setattr(psworker, "connect", lambda: Job(client))
        main()
        return client

    return run


def test_digits_reaches_its_accuracy(run: Run) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is an extra")

    client = run(digits.main, "--epochs", "3")

    assert client.version == 3 * 45
    assert client.metrics["accuracy"] >= 0.95


def check_saved_loss(file: Path, best: float) -> None:
    """Check that the weights in the file have this loss on the validation set."""
    model = early_stopping.make_model()
    model.load_state_dict(load_file(file))
    loss, _ = early_stopping.evaluate(model, [early_stopping.load()[1]])
    assert loss == pytest.approx(best, rel=1e-5)


def test_early_stopping_ends_with_the_best_weights_saved(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "best.safetensors"

    client = run(early_stopping.main, "--epochs", "40", "--patience", "2", "--save", str(file))

    assert client.version < 40 * 29
    assert client.metrics["best_validation_loss"] < 0.3
    assert client.metrics["best_validation_loss"] < client.metrics["validation_loss"]
    check_saved_loss(file, client.metrics["best_validation_loss"])


def test_digits_has_a_separate_fixed_test_set() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is an extra")

    (x, y), (test_x, test_y) = digits.load()

    assert [len(x), len(y), len(test_x), len(test_y)] == [1437, 1437, 360, 360]
    assert torch.equal(test_x, digits.load()[1][0])
    assert sorted(set(test_y.tolist())) == list(range(10))


def test_digits_without_scikit_learn_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(SystemExit, match=r"paramserver\[examples\]"):
        digits.load()


def test_charlm_reduces_its_loss(run: Run) -> None:
    client = run(charlm.main, "--bytes", "20000", "--batch-size", "8")

    assert client.version == 39
    assert client.metrics["loss"] < 4.0


def test_charlm_reads_the_same_text_each_time() -> None:
    text = charlm.source_text(5000)

    assert len(text) == 5000
    assert text == charlm.source_text(9000)[:5000]
    rows = charlm.windows(text)
    assert rows.shape == (4999 // charlm.CONTEXT_BYTES, charlm.CONTEXT_BYTES + 1)
    assert bytes(rows[0].tolist()) == text[: charlm.CONTEXT_BYTES + 1]


@pytest.mark.full
def test_gpt2_reduces_its_loss(run: Run) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra")

    client = run(gpt2.main, "--bytes", "20000", "--batch-size", "8")

    assert client.version == 39
    assert client.metrics["loss"] < 4.0


def test_resnet_reaches_its_accuracy(run: Run) -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        pytest.skip(f"torchvision is an extra: {error}")

    client = run(resnet.main, "--images", "512", "--epochs", "2")

    assert client.version == 2 * 16
    assert client.metrics["accuracy"] >= 0.8


@pytest.mark.parametrize(
    ("make", "library", "extra"),
    [(resnet.resnet18, "torchvision", "vision"), (gpt2.gpt2, "transformers", "transformers")],
)
def test_an_example_without_its_library_names_the_missing_package(
    make: Callable[[], Any], library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)

    with pytest.raises(SystemExit, match=rf"paramserver\[{extra}\]"):
        make()


class NumpyClient:
    """A server for one worker: plain gradient descent."""

    worker, version = 1, 0

    def __enter__(self) -> "NumpyClient":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def register(self, params: Mapping[str, Any], optimizer: Any) -> None:
        self.weights = {name: np.array(value) for name, value in params.items()}
        self.lr = optimizer.groups[0]["lr"]

    def pull(self, out: Mapping[str, Any]) -> None:
        for name, value in self.weights.items():
            out[name][...] = value

    def push_pull(
        self, grads: Mapping[str, Any], out: Mapping[str, Any], samples: int
    ) -> PushResult:
        for name, gradient in grads.items():
            self.weights[name] -= self.lr * gradient
        self.version += 1
        self.pull(out)
        return PushResult("applied", self.version)

    def report(self, **metrics: float) -> None:
        assert metrics["distance"] < 0.02


def test_linear_finds_the_true_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["linear", "--steps", "120"])
    monkeypatch.setattr(psworker, "Client", NumpyClient, raising=False)

    linear.main()

    assert "worker 1, version 120: distance to the true weights 0.00" in capsys.readouterr().out
