"""The data loader: batches leased from the ledger, read from map-style data sets or from
streams.
"""

__all__ = ["batches", "loader", "random_state", "torch_loader"]
