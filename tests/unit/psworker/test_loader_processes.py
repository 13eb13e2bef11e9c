"""What a script finds in the processes of a DataLoader, compared with torch's DataLoader."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.loader_ledger import Ledger
from tests.support.samplers import train_pass


class File(Dataset[Tensor]):
    """Data that each process of the DataLoader opens itself."""

    rows: Tensor | None = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        assert self.rows is not None
        return self.rows[index]


class Files(File):
    """The same, read by several indices at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def open_file(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert (info.id, info.num_workers) == (number, 2)
    data: Any = info.dataset
    assert len(data) == 6
    data.rows = torch.arange(6) * 10


def started() -> tuple[Job, ServerOptimizer]:
    job, model = Job(Ledger()), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize("data", [File(), Files()])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"persistent_workers": True},
        pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.full),
        pytest.param(
            {"multiprocessing_context": "spawn", "persistent_workers": True},
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_init_function_of_a_process_configures_its_data_set(
    data: File, options: dict[str, Any]
) -> None:
    job, optimizer = started()
    given: Any = DataLoader(data, 2, num_workers=2, worker_init_fn=open_file, **options)
    loader = job.batches(given)

    for _ in range(2):
        assert train_pass(loader, optimizer) == [[0, 10], [20, 30], [40, 50]]
    assert [batch.tolist() for batch in given] == [[0, 10], [20, 30], [40, 50]]
    assert data.rows is None


def test_without_processes_there_is_no_worker_info() -> None:
    job, optimizer = started()

    class Alone(File):
        def __getitem__(self, index: int) -> Tensor:
            assert get_worker_info() is None
            return torch.tensor(index)

    assert train_pass(job.batches(Alone(), 3, shuffle=False), optimizer) == [[0, 1, 2], [3, 4, 5]]
