"""From the arguments of `Job.batches` to a loader."""

from torch.utils.data import BatchSampler, DataLoader

from pscommon.core.errors import InvalidRequestError
from psworker.data.batches import BatchLoader
from psworker.data.data_source import DataSource, LoaderArguments, PassCounts, PassSettings
from psworker.data.map_dataset import MapDataset, is_map_style
from psworker.data.stream_dataset import StreamSource, is_stream
from psworker.data.torch_loader import unpack
from psworker.session.arguments import seed_of
from psworker.session.batch_trial import BatchTrial
from psworker.session.session import Session

SOURCE_KINDS = ((is_stream, StreamSource), (is_map_style, MapDataset))
"""The first kind that accepts the arguments makes the source."""


def make_loader(
    session: Session, arguments: LoaderArguments, settings: PassSettings, seed: int | None
) -> BatchLoader:
    """Return the loader of these arguments, which `Job.batches` describes.

    seed: None: the job's, which is known once the model is registered.

    Raises:
        InvalidRequestError: The arguments make no loader.
    """
    if isinstance(arguments.dataset, DataLoader):
        arguments = unpack(arguments.dataset, arguments)
    _check_exclusive(arguments)
    if arguments.batch_size is None and arguments.batch_sampler is None:
        raise InvalidRequestError("batch_size is missing. Try: job.batches(dataset, batch_size=32)")
    if session.trial is not None:
        arguments, settings = _for_trial(session.trial, arguments, settings)
    given = None if seed is None else seed_of(seed)
    settings = settings._replace(
        seed=lambda: seed_of(session.read_seed()) if given is None else given,
    )
    source = _make_source(arguments, settings, session.passes)
    return BatchLoader(session, source, settings.reseed, settings.name)


def _for_trial(
    trial: BatchTrial, arguments: LoaderArguments, settings: PassSettings
) -> tuple[LoaderArguments, PassSettings]:
    """Return the arguments of a loader whose batch size may be another one."""
    if type(given := arguments.batch_sampler) is BatchSampler:  # as DataLoaders of accelerate have
        arguments = arguments._replace(
            batch_size=given.batch_size,
            drop_last=given.drop_last,
            sampler=given.sampler,
            batch_sampler=None,
        )
    arguments = arguments._replace(batch_size=trial.batch_size(arguments.batch_size))
    rows = arguments.dataset
    rows = rows[0] if isinstance(rows, tuple) and rows else rows
    has_order = arguments.sampler is not None or arguments.batch_sampler is not None
    if has_order or is_stream(arguments, settings) or not hasattr(rows, "__len__"):
        return arguments, settings
    repeats = trial.repeats(arguments.batch_size, len(rows))
    return arguments, settings._replace(epochs=settings.epochs * repeats)


def _make_source(
    arguments: LoaderArguments, settings: PassSettings, passes: PassCounts
) -> DataSource:
    for accepts, source in SOURCE_KINDS:
        if accepts(arguments, settings):
            return source(arguments, settings, passes)
    raise InvalidRequestError(
        f"job.batches cannot read a {type(arguments.dataset).__name__}: it is neither a map-style "
        "data set (len() and items by number) nor a stream. Try: a list, a tensor, or an object "
        "with read(source, offset)"
    )


def _check_exclusive(arguments: LoaderArguments) -> None:
    if arguments.batch_sampler is not None:
        others = {
            "batch_size": arguments.batch_size is not None,
            "shuffle=True": bool(arguments.shuffle),
            "drop_last": arguments.drop_last,
            "sampler": arguments.sampler is not None,
        }
        if excluded := [name for name, is_given in others.items() if is_given]:
            raise InvalidRequestError(
                f"batch_sampler excludes {', '.join(excluded)}: it gives complete batches, in its "
                f"own order. Try: leave out {', '.join(excluded)}"
            )
    elif arguments.sampler is not None and arguments.shuffle:
        raise InvalidRequestError(
            "sampler excludes shuffle=True: it gives the order. Try: leave out shuffle"
        )
