"""The kinds of data sources that `Job.batches` accepts."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pscommon.core.errors import InvalidRequestError
from psworker.data.data_source import DataSource, LoaderArguments, PassCounts, PassSettings
from psworker.data.map_dataset import is_map_style, make_map_source
from psworker.data.stream_dataset import is_stream, make_stream_source


class SourceKind(NamedTuple):
    """A kind of data source.

    Attributes:
        accepts: Returns whether these arguments describe a source of this kind.
        make: Makes the source.
    """

    accepts: Callable[[LoaderArguments, PassSettings], bool]
    make: Callable[[LoaderArguments, PassSettings, PassCounts], DataSource]


SOURCE_KINDS = (
    SourceKind(is_stream, make_stream_source),
    SourceKind(is_map_style, make_map_source),
)
"""The first kind that accepts the arguments makes the source."""


def make_source(
    arguments: LoaderArguments, settings: PassSettings, passes: PassCounts
) -> DataSource:
    """Return the data source that these arguments describe.

    Raises:
        InvalidRequestError: No kind of source accepts them, or they contradict each other.
    """
    for kind in SOURCE_KINDS:
        if kind.accepts(arguments, settings):
            return kind.make(arguments, settings, passes)
    raise InvalidRequestError(_describe_refusal(arguments.dataset))


def _describe_refusal(dataset: Any) -> str:
    return (
        f"job.batches cannot read a {type(dataset).__name__}: it is neither a map-style data set "
        "(len() and items by number) nor a stream. Try: a list, a tensor, or an object with "
        "read(source, offset)"
    )
