"""Serve the data plane of a fake server."""

from collections.abc import Callable
from typing import Any

import grpc

from psproto.v1 import parameter_server_pb2 as pb

SERVICE = "psproto.v1.ParameterServerService"


def add_parameter_server_to_server(servicer: Any, server: grpc.Server) -> None:
    """As the generated function, but exchanges take and give raw frames.

    servicer.Exchange: iterator of bytes (decode_request reads them) and context to iterator of
    bytes. ExchangeOnce: from bytes to bytes.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Describe": _unary(servicer.Describe, pb.DescribeRequest),
        "Introduce": _unary(servicer.Introduce, pb.IntroduceRequest),
        "ExchangeOnce": grpc.unary_unary_rpc_method_handler(servicer.ExchangeOnce),
        "Exchange": grpc.stream_stream_rpc_method_handler(servicer.Exchange),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _unary(behaviour: Callable[..., Any], request: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_unary_rpc_method_handler(
        behaviour,
        request_deserializer=request.FromString,
        response_serializer=lambda response: response.SerializeToString(),
    )
