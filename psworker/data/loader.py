"""From the arguments of `Job.batches` to a loader."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from pscommon.core.errors import InvalidRequestError
from psworker.arguments import seed_of
from psworker.batches import Batches
from psworker.data.map_dataset import Fetcher, MapStyle, check_options, map_style
from psworker.streams import StreamData, is_stream, refuse

if TYPE_CHECKING:
    from psworker.job import Job


def loader_of(
    job: "Job",
    dataset: Any,
    batch_size: int | None,
    *,
    epochs: int,
    shuffle: bool | None,
    seed: int,
    drop_last: bool,
    sources: int | None,
    reseed: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    options: dict[str, Any],
) -> Batches:
    """Return what `Job.batches` returns, where the arguments are described. InvalidRequestError for wrong ones."""
    if batch_size is None:
        raise InvalidRequestError("batch_size is missing. Try: job.batches(dataset, batch_size=32)")
    collate, seed = collate_fn or default_collate, seed_of(seed)
    if sources is not None or is_stream(dataset):
        refuse(drop_last, options)
        sources = 1 if sources is None else sources
        stream = StreamData(dataset, batch_size, epochs, sources, collate, seed if reseed else None)
        return Batches(job, stream, reseed)
    check_options(options)
    data = map_style(dataset)
    fetcher = Fetcher(data, collate, reseed)
    shuffle = shuffle is None or shuffle
    rows = MapStyle(data, batch_size, epochs, drop_last, shuffle, seed, fetcher, options, job.passes)
    return Batches(job, rows, reseed)
