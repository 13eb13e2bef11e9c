"""Requests to servers: the transport interface, gRPC, server addresses, and parallel calls."""

__all__ = ["executor", "grpc", "interface", "streams"]
