"""Names that the code uses in formats, for a comparison with the promised names."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from prometheus_client import CollectorRegistry

from psproto.v1 import (
    coordinator_pb2,
    log_pb2,
    model_pb2,
    parameter_server_pb2,
    shard_pb2,
    standby_pb2,
)

FILES = (coordinator_pb2, log_pb2, model_pb2, parameter_server_pb2, shard_pb2, standby_pb2)

STATE_MAPS = {
    "pushes": "WORKER",
    "metrics": "NAME",
    "counts": "OUTCOME",
    "updates": "OPTIMIZER",
    "roster.forgotten.states": "STATE",
}
"""Objects in the coordinator's state whose keys are data."""


def proto() -> set[str]:
    """Yield a line for each message, field, enum value and method."""
    return {line for module in FILES for line in _file(module.DESCRIPTOR.serialized_pb)}


def _file(serialized: bytes) -> Iterator[str]:
    file = FileDescriptorProto.FromString(serialized)
    for message in file.message_type:
        yield from _message(message, message.name)
    for enum in file.enum_type:
        yield from _enum(enum, enum.name)
    for service in file.service:
        for method in service.method:
            request = "stream " * method.client_streaming + _short(method.input_type)
            response = "stream " * method.server_streaming + _short(method.output_type)
            yield f"rpc {file.package}.{service.name}.{method.name}: {request} -> {response}"


def _message(message: DescriptorProto, name: str) -> Iterator[str]:
    yield f"message {name}"
    maps = {
        f"{name}.{nested.name}": f"map<{_type(nested.field[0])}, {_type(nested.field[1])}>"
        for nested in message.nested_type
        if nested.options.map_entry
    }
    for field in message.field:
        yield f"{name}.{field.name} = {field.number}: {_labelled(message, field, maps)}"
    for enum in message.enum_type:
        yield from _enum(enum, f"{name}.{enum.name}")
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from _message(nested, f"{name}.{nested.name}")


def _labelled(
    message: DescriptorProto, field: FieldDescriptorProto, maps: Mapping[str, str]
) -> str:
    kind = _type(field)
    if kind in maps:
        return maps[kind]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind} of {message.oneof_decl[field.oneof_index].name}"
    return kind


def _type(field: FieldDescriptorProto) -> str:
    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return _short(field.type_name) if field.type_name else name


def _short(name: str) -> str:
    return name.removeprefix(".psproto.v1.")


def _enum(enum: EnumDescriptorProto, name: str) -> Iterator[str]:
    for value in enum.value:
        yield f"enum {name}.{value.name} = {value.number}"


def key_paths(value: Any, maps: Mapping[str, str], path: str = "") -> set[str]:
    """Yield the keys of nested JSON, joined by dots; [] is a list element.

    maps: paths of objects whose keys are data, with a placeholder for these keys.
    """
    if isinstance(value, list):
        return {found for each in value for found in key_paths(each, maps, f"{path}[]")}
    if not isinstance(value, dict):
        return set()
    found = set[str]()
    for key, each in value.items():
        shown = maps.get(path, key)
        below = f"{path}.{shown}" if path else shown
        found |= {below} | key_paths(each, maps, below)
    return found


def metrics(registry: CollectorRegistry) -> set[str]:
    """Yield type, name and labels of each metric family, without labels of the value."""
    return {
        f"{family.type} {family.name} {','.join(sorted({*labels} - {'le', 'quantile'}))}".strip()
        for family in registry.collect()
        for labels in [{label for sample in family.samples for label in sample.labels}]
        if family.name.startswith("ps_")
    }


def file_names(folder: Path) -> set[str]:
    """Yield the files of a data directory with placeholders for numbers; spare files are left
    out.
    """
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {_without_numbers(path) for path in paths if not path.endswith(".spare")}


def _without_numbers(path: str) -> str:
    for pattern, word in (
        (r"\d{12}", "VERSION"),
        (r"(?<=-)[0-9a-f]{16}(?=\.)", "SHA"),
        (r"(?<=-)\d{4}(?=\.)", "NUMBER"),
        (r"\d{9}(?=\.json)", "NUMBER"),
        (r"shard-\d+", "shard-I"),
        (r"of-\d+", "of-N"),
        (r"job-key-\d+", "job-key-I"),
    ):
        path = re.sub(pattern, word, path)
    return path
