"""The arguments of torch's DataLoader as arguments of `Job.batches`."""

from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from pscommon.core.errors import InvalidRequestError
from psworker.data.data_source import LoaderArguments

MEMBERS_OF_ITERATION = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
"""Members of DataLoader that decide what its batches are, beside those that `unpack` reads."""


def unpack(loader: DataLoader[Any], arguments: LoaderArguments) -> LoaderArguments:
    """Return the arguments that a DataLoader was made with.

    Its generator is not among them; only its sampler draws from it.

    arguments: Those of the call, which must not repeat those of the DataLoader.

    Raises:
        InvalidRequestError: An argument has no equivalent here, or is given in the call too.
    """
    defaults = LoaderArguments(arguments.dataset)._asdict()
    repeated = [name for name, value in arguments._asdict().items() if value is not defaults[name]]
    repeated = [name for name in repeated if name != "options"] + list(arguments.options)
    if repeated:
        raise InvalidRequestError(
            f"the DataLoader excludes {', '.join(repeated)}: it has its own. Try: "
            "job.batches(loader), or job.batches(loader.dataset, batch_size=...) with all options"
        )
    if own := _own_members(loader):
        raise InvalidRequestError(
            f"{type(loader).__name__} cannot be divided among workers: it defines its own "
            f"{', '.join(own)}. Try: job.batches(loader.dataset, batch_size=...), with its "
            "transform as collate_fn"
        )
    if loader.batch_sampler is None:
        raise InvalidRequestError(
            "a DataLoader with batch_size=None cannot be used: it makes no batches. Try: a data "
            "set of samples, with a batch_size"
        )
    batch_sampler, sampler, shuffle, length = None, None, None, None
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        batch_sampler = loader.batch_sampler
    elif not isinstance(loader.dataset, IterableDataset):
        sampler, shuffle = _sampler_or_shuffle(loader)
        length = cast(Sized, loader.sampler) if sampler is None else None
    return LoaderArguments(
        loader.dataset,
        None if batch_sampler else loader.batch_size,
        shuffle,
        loader.drop_last,
        sampler,
        batch_sampler,
        loader.collate_fn,
        _options(loader),
        length,
    )


def _own_members(loader: DataLoader[Any]) -> list[str]:
    """Return the members of iteration that are not those of DataLoader."""
    return [
        name
        for name in MEMBERS_OF_ITERATION
        if name in vars(loader) or getattr(type(loader), name) is not getattr(DataLoader, name)
    ]


def _sampler_or_shuffle(loader: DataLoader[Any]) -> tuple[Any, bool | None]:
    """Return a sampler and None, or for a sampler that torch makes by default None and shuffle."""
    sampler: Any = loader.sampler
    dataset: Any = loader.dataset
    if type(sampler) is SequentialSampler and len(sampler) == len(dataset):
        return None, False
    if type(sampler) is not RandomSampler:
        return sampler, None
    has_all = sampler.num_samples == len(dataset) and sampler._num_samples is None
    if has_all and not sampler.replacement and sampler.generator is None:
        return None, True
    return sampler, None


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    defaults = {
        "num_workers": 0,
        "pin_memory": False,
        "timeout": 0,
        "worker_init_fn": None,
        "multiprocessing_context": None,
        "persistent_workers": False,
        "pin_memory_device": "",
        "in_order": True,
    }
    options = {
        name: value
        for name, default in defaults.items()
        if (value := getattr(loader, name, default)) != default
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    return options
