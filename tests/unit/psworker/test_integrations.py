"""The framework adapters without servers; tests/scripts compares their training with the plain
frameworks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from psworker.integrations import check_device, refuse_checkpoint, steps_before
from psworker.job import Job

EXTRA = "needs an extra of paramserver that is not installed"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PS_LOCAL", "1")
    return psworker.connect(device="cpu")


class Progress:
    """Fake job with the attributes that `steps_before` reads."""

    def __init__(self, policy: str, first_version: int, workers: int) -> None:
        self.policy, self.first_version, self.workers = policy, first_version, workers


@pytest.mark.parametrize(
    ("policy", "steps"), [("sync", 12), ("local", 12), ("async", 6), ("ssp", 6)]
)
def test_steps_before_counts_steps_of_one_worker(policy: str, steps: int) -> None:
    progress: Any = Progress(policy, 12, workers=2)

    assert steps_before(progress) == steps


def test_another_device_is_refused_with_the_remedy(job: Job) -> None:
    check_device(job, torch.device("cpu"), "x")

    with pytest.raises(psworker.InvalidRequestError, match="ACCELERATE_TORCH_DEVICE=cpu"):
        check_device(job, torch.device("meta"), "x")


def test_a_checkpoint_to_resume_from_is_refused() -> None:
    refuse_checkpoint(None)

    with pytest.raises(psworker.InvalidRequestError, match="--data-dir"):
        refuse_checkpoint("out/checkpoint-5")


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=2)


class TestAccelerate:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("accelerate", reason=EXTRA)

    def accelerator(self, job: Job, **options: Any) -> Any:
        from psworker.integrations.accelerate import Accelerator

        return Accelerator(cpu=True, job=job, **options)

    def test_only_the_first_loader_is_shared_between_workers(self, job: Job) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, training, evaluation = self.accelerator(job).prepare(model, optimizer, data(), data())

        assert type(training).__name__ == "TrainingLoader"
        assert isinstance(evaluation, DataLoader)
        assert len(training) == len(evaluation) == 4

    def test_gradient_accumulation_steps_at_the_end_of_a_pass(self, job: Job) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator = self.accelerator(job, gradient_accumulation_steps=3)
        model, optimizer, training = accelerator.prepare(model, optimizer, data())
        for x, y in training:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        assert job.version == 2

    @pytest.mark.parametrize("count", [0, 2])
    def test_none_or_several_models_are_refused(self, job: Job, count: int) -> None:
        models = [nn.Linear(2, 1) for _ in range(count)]
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)

        with pytest.raises(psworker.InvalidRequestError, match="one ModuleDict"):
            self.accelerator(job).prepare(*models, optimizer)

    def test_another_clip_norm_is_refused(self, job: Job) -> None:
        accelerator = self.accelerator(job, clip_norm=1.0)
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.full((2,), 3.0)

        assert accelerator.clip_grad_norm_([parameter], 1.0).item() == pytest.approx(18**0.5)
        assert parameter.grad.tolist() == [3.0, 3.0]
        with pytest.raises(psworker.InvalidRequestError, match="clip_norm=2"):
            accelerator.clip_grad_norm_([parameter], 2.0)

    def test_load_state_is_refused(self, job: Job, tmp_path: Path) -> None:
        with pytest.raises(psworker.InvalidRequestError, match="--data-dir"):
            self.accelerator(job).load_state(str(tmp_path))


class TestLightning:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("lightning", reason=EXTRA)

    def fit(
        self, job: Job, optimizers: int = 1, checkpoint: str | None = None, **options: Any
    ) -> Any:
        from lightning.pytorch import LightningModule, Trainer

        from psworker.integrations.lightning import ParameterServerStrategy

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 1)

            def training_step(self, batch: Any, _: int) -> torch.Tensor:
                return (self.linear(batch[0]) - batch[1]).square().mean()

            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(optimizers)]

        trainer = Trainer(
            strategy=ParameterServerStrategy(job),
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(Module(), data(), ckpt_path=checkpoint)
        return trainer

    @pytest.mark.filterwarnings("ignore")
    def test_each_batch_is_a_step_on_the_servers(self, job: Job) -> None:
        trainer = self.fit(job)

        assert job.version == trainer.global_step == 8

    @pytest.mark.filterwarnings("ignore")
    def test_clipping_by_value_is_refused(self, job: Job) -> None:
        with pytest.raises(psworker.InvalidRequestError, match="gradient_clip_algorithm='norm'"):
            self.fit(job, gradient_clip_val=1.0, gradient_clip_algorithm="value")

    @pytest.mark.filterwarnings("ignore")
    def test_a_checkpoint_is_refused(self, job: Job, tmp_path: Path) -> None:
        with pytest.raises(psworker.InvalidRequestError, match="--data-dir"):
            self.fit(job, checkpoint=str(tmp_path / "last.ckpt"))


class TestTransformers:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("transformers", reason=EXTRA)

    def trainer(self, job: Job, folder: Path, **options: Any) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

        from psworker.integrations.transformers import Trainer

        size = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 16, (8, 8))]
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        return Trainer(model=model, args=arguments, train_dataset=rows, job=job)

    @pytest.mark.filterwarnings("ignore")
    def test_each_update_is_a_step_on_the_servers(self, job: Job, tmp_path: Path) -> None:
        trainer = self.trainer(
            job, tmp_path, num_train_epochs=2, gradient_accumulation_steps=3, save_strategy="no"
        )
        trainer.train()

        assert job.version == trainer.state.global_step == 4

    @pytest.mark.filterwarnings("ignore")
    def test_max_steps_ends_the_training(self, job: Job, tmp_path: Path) -> None:
        trainer = self.trainer(job, tmp_path, max_steps=3, save_strategy="no")
        trainer.train()

        assert job.version == 3

    @pytest.mark.filterwarnings("ignore")
    def test_the_first_worker_saves(self, job: Job, tmp_path: Path) -> None:
        self.trainer(job, tmp_path, max_steps=2, save_steps=2).train()

        assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()

    @pytest.mark.filterwarnings("ignore")
    def test_a_checkpoint_is_refused(self, job: Job, tmp_path: Path) -> None:
        with pytest.raises(psworker.InvalidRequestError, match="--data-dir"):
            self.trainer(job, tmp_path).train(resume_from_checkpoint=str(tmp_path))
