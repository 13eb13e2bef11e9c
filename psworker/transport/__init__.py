"""Requests to servers: the transport interface, gRPC, server addresses, and parallel calls."""

__all__ = ["exchange_calls", "executor", "grpc_transport", "interface"]
