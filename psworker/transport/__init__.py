"""Requests to servers: the transport interface, gRPC, server addresses, and parallel calls."""
