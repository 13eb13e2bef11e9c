"""What torch's DataLoader was told, as arguments of `job.batches`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from pscommon.core.errors import InvalidRequestError


class LoaderArguments(NamedTuple):
    """Arguments of `job.batches` that say what the batches are. options: for torch's DataLoader."""

    dataset: Any
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Any = None
    options: Mapping[str, Any] = MappingProxyType({})


def unpacked(loader: DataLoader[Any], given: LoaderArguments) -> LoaderArguments:
    """Return what a DataLoader was told. given: the other arguments of the call, which must not
    say it as well.

    Its generator has no part in this, except that its sampler draws from it.

    Raises:
        InvalidRequestError: An argument has no equivalent here, or was given in the call too.
    """
    nothing = LoaderArguments(given.dataset)
    twice = [name for name in given._fields if getattr(given, name) is not getattr(nothing, name)]
    twice = [name for name in twice if name != "options"] + list(given.options)
    if twice:
        raise InvalidRequestError(
            f"the DataLoader says itself what {', '.join(twice)} is. Try: job.batches(loader), or "
            "job.batches(loader.dataset, batch_size=...) with all options"
        )
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise InvalidRequestError(
            f"{kind.__name__} has an __iter__ of its own, which cannot be divided among workers. "
            "Try: job.batches(loader.dataset, batch_size=...)"
        )
    if loader.batch_sampler is None:
        raise InvalidRequestError(
            "a DataLoader with batch_size=None makes no batches: its data set does. Try: a data "
            "set of samples, with a batch_size"
        )
    batch_sampler, sampler, shuffle = None, None, None
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        batch_sampler = loader.batch_sampler
    elif not isinstance(loader.dataset, IterableDataset):
        sampler, shuffle = _order(loader)
    return LoaderArguments(
        loader.dataset,
        None if batch_sampler else loader.batch_size,
        shuffle,
        loader.drop_last,
        sampler,
        batch_sampler,
        loader.collate_fn,
        _options(loader),
    )


def _order(loader: DataLoader[Any]) -> tuple[Any, bool | None]:
    """Return the sampler, or whether to shuffle where it is one that torch makes by default."""
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return None, False
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    if plain and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return None, True
    return sampler, None


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Those that are not DataLoader's defaults."""
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
