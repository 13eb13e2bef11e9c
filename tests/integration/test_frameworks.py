"""Lightning's loops on two workers: the same updates, metrics, checkpoints and stop on both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from psworker import InvalidRequestError, Job
from tests.support.cluster import Cluster
from tests.support.framework_data import ROWS, Stream, rows
from tests.support.policies import POLICIES
from tests.support.training_threads import real

Make = Callable[..., Cluster]

EXTRA = "needs an extra of paramserver that is not installed"
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
pytestmark = pytest.mark.filterwarnings("ignore")


class TestLightning:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("lightning", reason=EXTRA)

    def module(self, rank: int = 0, noise: float = 0.0) -> Any:
        """Return a module that keeps the metrics of its validations.

        noise: Makes the metrics of the workers differ.
        """
        from lightning.pytorch import LightningModule

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.linear = nn.Linear(6, 1)
                self.losses: list[float] = []
                self.steps: list[int] = []

            def training_step(self, batch: Any, _: int) -> torch.Tensor:
                return nn.functional.mse_loss(self.linear(batch[0]), batch[1])

            def validation_step(self, batch: Any, _: int) -> None:
                loss = nn.functional.mse_loss(self.linear(batch[0]), batch[1])
                self.log("val_loss", loss + rank * noise)
                self.log("synced", 1.0 * rank, sync_dist=True)

            def on_validation_end(self) -> None:
                if not self.trainer.sanity_checking:
                    self.losses.append(float(self.trainer.callback_metrics["val_loss"]))
                    self.steps.append(self.trainer.global_step)

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.1)

        return Module()

    def trainer(self, job: Job, *callbacks: Any, **options: Any) -> Any:
        from lightning.pytorch import Trainer

        from psworker.integrations.lightning import ParameterServerStrategy

        return Trainer(
            strategy=ParameterServerStrategy(job),
            accelerator="cpu",
            callbacks=list(callbacks),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": False, "max_epochs": 3, **options},
        )

    @each_policy
    def test_ranks_stop_after_the_same_pass(self, cluster: Make, policy: dict[str, Any]) -> None:
        from lightning.pytorch.callbacks import EarlyStopping

        def script(job: Job) -> tuple[Any, ...]:
            module = self.module(job.rank, noise=0.5)
            stop = EarlyStopping("val_loss", patience=1)
            trainer = self.trainer(job, stop, max_epochs=30)
            trainer.fit(module, rows(0, 20), rows(64, 100))
            weights = module.linear.weight.tolist()
            return trainer.current_epoch, module.losses, weights, stop.best_score.item()

        first, second = real(cluster(2, min_workers=2, **policy).addresses, 2, script)

        assert first == second
        assert 1 < len(first[1]) == first[0] < 30 or policy

    def test_the_best_checkpoint_is_known_to_all_ranks(self, cluster: Make, tmp_path: Path) -> None:
        from lightning.pytorch.callbacks import ModelCheckpoint

        def script(job: Job) -> tuple[Any, ...]:
            module = self.module(job.rank, noise=0.5)
            best = ModelCheckpoint(tmp_path / str(job.rank), "{step}", monitor="val_loss")
            trainer = self.trainer(job, best, enable_checkpointing=True)
            trainer.fit(module, rows(0, 20), rows(64, 100))
            losses = [*module.losses]
            found = trainer.validate(module, rows(64, 100), ckpt_path="best", verbose=False)
            return best.best_model_path, best.best_model_score.item(), losses, found[0]

        first, second = real(cluster(min_workers=2).address, 2, script)

        assert first[:3] == second[:3]
        assert Path(first[0]).is_relative_to(tmp_path / "0")
        assert Path(first[0]).is_file()
        assert first[1] == min(first[2])
        assert second[3]["val_loss"] == pytest.approx(first[3]["val_loss"] + 0.5)

    @pytest.mark.parametrize("accumulated", [1, 2, 3])
    def test_ranks_validate_and_save_at_the_same_updates(
        self, cluster: Make, tmp_path: Path, accumulated: int
    ) -> None:
        from lightning.pytorch.callbacks import ModelCheckpoint

        def script(job: Job) -> tuple[Any, ...]:
            module = self.module(job.rank)
            save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
            trainer = self.trainer(
                job,
                save,
                enable_checkpointing=True,
                accumulate_grad_batches=accumulated,
                val_check_interval=0.5,
                max_epochs=2,
            )
            trainer.fit(module, rows(0, 60), rows(64, 100))
            return trainer.global_step, module.steps, module.losses, job.version

        first, second = real(cluster(min_workers=2).address, 2, script)

        # 15 batches: 8 for one worker, 7 for the other one
        updates = 2 * -(-8 // accumulated)
        assert first == second
        assert first[0] == first[3] == updates
        assert len(first[1]) == 4
        assert first[1][-1] == updates
        saved = {f"step={step}.ckpt" for step in range(2, updates + 1, 2)}
        assert {path.name for path in tmp_path.iterdir()} == saved

    @pytest.mark.parametrize("kind", ["map", "stream"])
    def test_max_steps_counts_updates(self, cluster: Make, kind: str) -> None:
        def script(job: Job) -> tuple[Any, ...]:
            module = self.module(job.rank)
            loader = rows(0, 100) if kind == "map" else DataLoader(Stream([*ROWS]), batch_size=4)
            trainer = self.trainer(job, max_steps=8, max_epochs=-1, val_check_interval=4)
            trainer.fit(module, loader, rows(64, 100))
            return trainer.global_step, job.version, module.steps, module.losses

        first, second = real(cluster(min_workers=2).address, 2, script)

        assert first == second
        assert first[:3] == (8, 8, [4, 8])

    def test_a_pass_over_a_stream_ends_with_a_validation(self, cluster: Make) -> None:
        def script(job: Job) -> tuple[Any, ...]:
            module = self.module(job.rank)
            stream = DataLoader(Stream([ROWS[number] for number in range(20)]), batch_size=4)
            trainer = self.trainer(job, max_epochs=2)
            trainer.fit(module, stream, rows(64, 100))
            return trainer.global_step, job.version, module.steps, module.losses

        first, second = real(cluster(min_workers=2).address, 2, script)

        assert first == second
        assert first[:3] == (10, 10, [5, 10])

    def test_a_module_with_two_optimizers(self, cluster: Make) -> None:
        base = type(self.module())

        class Two(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                self.other = nn.Linear(6, 1)
                self.automatic_optimization = False

            def training_step(self, batch: Any, _: int) -> None:
                for network, optimizer in zip(
                    (self.linear, self.other), self.optimizers(), strict=True
                ):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(network(batch[0]), batch[1]).backward()
                    optimizer.step()

            def configure_optimizers(self) -> Any:
                return [
                    torch.optim.Adam(self.linear.parameters(), lr=0.1),
                    torch.optim.SGD(self.other.parameters(), lr=0.1),
                ]

        def script(job: Job) -> tuple[Any, ...]:
            module = Two()
            trainer = self.trainer(job, max_epochs=2)
            trainer.fit(module, rows(0, 20), rows(64, 100))
            weights = [each.tolist() for each in module.parameters()]
            return trainer.global_step, module.steps, module.losses, weights, job.version

        first, second = real(cluster(min_workers=2).address, 2, script)

        assert first == second
        assert first[0] == first[4] == 2 * 2 * 3
        assert first[1] == [6, 12]

    def test_a_resumed_job_begins_after_its_completed_passes(
        self, cluster: Make, tmp_path: Path
    ) -> None:
        from lightning.pytorch.callbacks import EarlyStopping

        def script(epochs: int) -> Callable[[Job], tuple[Any, ...]]:
            def run(job: Job) -> tuple[Any, ...]:
                module = self.module(job.rank)
                trainer = self.trainer(job, EarlyStopping("val_loss"), max_epochs=epochs)
                trainer.fit(module, rows(0, 20), rows(64, 100))
                return trainer.current_epoch, trainer.global_step, module.steps

            return run

        servers = cluster(min_workers=2, data_dir=tmp_path)
        real(servers.address, 2, script(2))
        servers.stop()
        address = cluster(min_workers=2, data_dir=tmp_path).address

        assert real(address, 2, script(2)) == [(2, 6, [])] * 2
        assert real(address, 2, script(3)) == [(3, 9, [9])] * 2

    def test_several_training_loaders_and_later_parameters_are_refused(self, cluster: Make) -> None:
        from lightning.pytorch.callbacks import BackboneFinetuning

        def script(job: Job) -> None:
            module = self.module()
            module.backbone = nn.Linear(6, 6)
            with pytest.raises(InvalidRequestError, match="requires_grad"):
                self.trainer(job, BackboneFinetuning()).fit(module, rows(0, 20))
            with pytest.raises(InvalidRequestError, match="StackDataset"):
                self.trainer(job).fit(self.module(), [rows(0, 20), rows(0, 20)])

        real(cluster().address, 1, script)
