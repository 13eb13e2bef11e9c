"""The Trainer and Accelerator on two workers: the same updates, metrics and stop on both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

from psworker import Job
from tests.support.cluster import Cluster
from tests.support.framework_data import Stream, rows
from tests.support.policies import POLICIES
from tests.support.training_threads import real

Make = Callable[..., Cluster]

EXTRA = "needs an extra of paramserver that is not installed"
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
pytestmark = pytest.mark.filterwarnings("ignore")


class TestTransformers:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("transformers", reason=EXTRA)

    def trainer(self, job: Job, folder: Path, stream: bool = False, **options: Any) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

        from psworker.integrations.transformers import Trainer

        size = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**size, **drops, bos_token_id=0, eos_token_id=0))
        numbers = torch.randint(0, 16, (68, 8), generator=torch.Generator().manual_seed(0))
        samples = [{"input_ids": row, "labels": row} for row in numbers]
        callbacks = options.pop("callbacks", [])
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **{"learning_rate": 0.1, "save_strategy": "no", **options},
        )
        training: Any = Stream(samples[:60]) if stream else samples[:60]

        class InOrder(Trainer):  # threads share the generators that a random order needs
            def _get_train_sampler(self, *_: Any) -> Any:
                return SequentialSampler(samples[:60])

        return InOrder(
            model=model,
            args=arguments,
            train_dataset=training,
            eval_dataset=samples[60:],
            job=job,
            callbacks=callbacks,
        )

    @pytest.mark.full
    @each_policy
    def test_the_best_weights_are_loaded_on_all_ranks(
        self, cluster: Make, tmp_path: Path, policy: dict[str, Any]
    ) -> None:
        def script(job: Job) -> tuple[Any, ...]:
            trainer = self.trainer(
                job,
                tmp_path,
                eval_strategy="epoch",
                save_strategy="epoch",
                load_best_model_at_end=True,
                save_total_limit=1,
                num_train_epochs=3,
            )
            trainer.train()
            state, found = trainer.state, trainer.evaluate()["eval_loss"]
            losses = [each["eval_loss"] for each in state.log_history if "eval_loss" in each]
            return found, state.best_model_checkpoint, state.best_metric, losses

        first, second = real(cluster(min_workers=2, **policy).address, 2, script)

        assert first == second
        assert first[0] == pytest.approx(first[2])
        assert first[2] == min(first[3])
        assert [path for path in tmp_path.iterdir() if path.is_dir()] == [Path(first[1])]

    @pytest.mark.parametrize("stream", [False, True])
    def test_ranks_evaluate_save_and_stop_at_the_same_step(
        self, cluster: Make, tmp_path: Path, stream: bool
    ) -> None:
        from transformers import EarlyStoppingCallback

        def script(job: Job) -> tuple[Any, ...]:
            trainer = self.trainer(
                job,
                tmp_path,
                stream,
                eval_strategy="steps",
                eval_steps=2,
                save_strategy="steps",
                save_steps=4,
                load_best_model_at_end=True,
                callbacks=[EarlyStoppingCallback(2)],
                num_train_epochs=30,
                **({"max_steps": 60} if stream else {}),
            )
            trainer.train()
            history = trainer.state.log_history
            evaluated = [
                (each["step"], each["eval_loss"]) for each in history if "eval_loss" in each
            ]
            state = trainer.state
            return state.global_step, evaluated, state.best_model_checkpoint, job.version

        first, second = real(cluster(min_workers=2).address, 2, script)

        assert first == second
        assert first[0] == first[3] == first[1][-1][0]
        assert [step for step, _ in first[1]] == list(range(2, first[0] + 1, 2))

    @pytest.mark.parametrize("stream", [False, True])
    def test_max_steps_counts_updates(self, cluster: Make, tmp_path: Path, stream: bool) -> None:
        def script(job: Job) -> tuple[int, int]:
            trainer = self.trainer(job, tmp_path, stream, max_steps=8)
            trainer.train()
            return trainer.state.global_step, job.version

        assert real(cluster(min_workers=2).address, 2, script) == [(8, 8), (8, 8)]

    def test_a_worker_with_fewer_batches_ends_with_the_same_step_and_rate(
        self, cluster: Make, tmp_path: Path
    ) -> None:
        def script(job: Job) -> tuple[Any, ...]:
            trainer = self.trainer(
                job, tmp_path, num_train_epochs=2, lr_scheduler_type="linear", warmup_steps=3
            )
            trainer.train()
            return trainer.state.global_step, trainer.state.epoch, trainer.lr_scheduler.last_epoch

        assert real(cluster(min_workers=2).address, 2, script) == [(16, 2.0, 16)] * 2

    def test_a_resumed_job_skips_its_completed_passes(self, cluster: Make, tmp_path: Path) -> None:
        def script(epochs: int) -> Callable[[Job], tuple[Any, ...]]:
            def run(job: Job) -> tuple[Any, ...]:
                trainer = self.trainer(
                    job, tmp_path / "out", eval_strategy="epoch", num_train_epochs=epochs
                )
                trainer.train()
                history = [each for each in trainer.state.log_history if "eval_loss" in each]
                return trainer.state.global_step, [each["step"] for each in history]

            return run

        servers = cluster(min_workers=2, data_dir=tmp_path)
        assert real(servers.address, 2, script(2)) == [(16, [8, 16])] * 2
        servers.stop()
        address = cluster(min_workers=2, data_dir=tmp_path).address

        assert real(address, 2, script(2)) == [(16, [])] * 2
        assert real(address, 2, script(3)) == [(24, [24])] * 2


class TestAccelerate:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("accelerate", reason=EXTRA)

    def test_ranks_stop_together_and_wait_for_a_checkpoint(
        self, cluster: Make, tmp_path: Path
    ) -> None:
        file = tmp_path / "model.pt"

        def script(job: Job) -> tuple[Any, ...]:
            from psworker.integrations.accelerate import Accelerator

            accelerator = Accelerator(cpu=True, job=job)
            model = nn.Linear(6, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, training = accelerator.prepare(model, optimizer, rows(0, 20))
            for epoch in range(10):
                for x, y in training:
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                if epoch == 1 and job.rank == 1:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    break
            if accelerator.is_main_process:
                torch.save(model.state_dict(), file)
            accelerator.wait_for_everyone()
            saved = torch.load(file, weights_only=True)
            return epoch, job.version, saved["weight"].tolist() == model.weight.tolist()

        assert real(cluster(min_workers=2).address, 2, script) == [(1, 6, True)] * 2
