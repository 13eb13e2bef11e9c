"""What every part of a server process needs: configuration, identity, metrics, and the gRPC
server.
"""

__all__ = [
    "config",
    "generation_file",
    "grpc_server",
    "handlers",
    "identity",
    "job_files",
    "metrics",
    "port_file",
    "worker_exits",
]
