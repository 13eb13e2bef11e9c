"""From the arguments of `Job.batches` to a loader."""

from typing import Any

from torch.utils.data import DataLoader, default_collate

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from psworker.data.batches import BatchLoader
from psworker.data.map_dataset import BatchFetcher, MapDataset, check_options, map_style, spec_made
from psworker.data.order import check_sampler
from psworker.data.stream_dataset import StreamData, is_stream, refuse
from psworker.data.torch_loader import LoaderArguments, unpacked
from psworker.session.arguments import seed_of
from psworker.session.session import Session


def loader_of(
    session: Session,
    given: LoaderArguments,
    epochs: int,
    seed: int,
    sources: int | None,
    reseed: bool,
) -> BatchLoader:
    """Return what `Job.batches` returns, where the arguments are described. InvalidRequestError
    for wrong ones.
    """
    if isinstance(given.dataset, DataLoader):
        given = unpacked(given.dataset, given)
    _check_exclusive(given)
    if given.batch_size is None and given.batch_sampler is None:
        raise InvalidRequestError("batch_size is missing. Try: job.batches(dataset, batch_size=32)")
    seed, collate = seed_of(seed), given.collate_fn or default_collate
    if sources is not None or is_stream(given.dataset):
        refuse(given)
        count = 1 if sources is None else sources
        stream = StreamData(
            given.dataset, given.batch_size, epochs, count, collate, seed if reseed else None
        )
        return BatchLoader(session, stream, reseed)
    check_options(given.options)
    data, sampler = map_style(given.dataset), _sampler(given, epochs)
    shuffle = sampler is None and (given.shuffle is None or given.shuffle)
    by_batch = given.batch_sampler is not None
    size = 1 if by_batch else given.batch_size
    loop = spec_made(LoopSpec, 0, len(data), size, epochs, given.drop_last, shuffle, seed)
    rows = MapDataset(
        data,
        loop,
        BatchFetcher(data, collate, reseed),
        given.options,
        session.passes,
        sampler,
        by_batch,
    )
    return BatchLoader(session, rows, reseed)


def _check_exclusive(given: LoaderArguments) -> None:
    if given.batch_sampler is not None:
        others = {
            "batch_size": given.batch_size is not None,
            "shuffle=True": bool(given.shuffle),
            "drop_last": given.drop_last,
            "sampler": given.sampler is not None,
        }
        if excluded := [name for name, is_given in others.items() if is_given]:
            raise InvalidRequestError(
                f"batch_sampler excludes {', '.join(excluded)}: it gives whole batches, in its own "
                f"order. Try: leave out {', '.join(excluded)}"
            )
    elif given.sampler is not None and given.shuffle:
        raise InvalidRequestError(
            "sampler excludes shuffle=True: it gives the order. Try: leave out shuffle"
        )


def _sampler(given: LoaderArguments, epochs: int) -> Any:
    """Return the sampler or batch sampler, None where there is none."""
    option = "sampler" if given.batch_sampler is None else "batch_sampler"
    sampler = given.sampler if given.batch_sampler is None else given.batch_sampler
    if sampler is None:
        return None
    check_sampler(option, sampler)
    if epochs != 1:
        raise InvalidRequestError(
            f"{option} excludes epochs={epochs!r}: it gives the order of one pass at a time. Try: "
            "`for epoch in range(epochs): for batch in loader: ...`"
        )
    return sampler
