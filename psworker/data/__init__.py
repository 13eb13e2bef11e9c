"""The data loader: batches leased from the ledger, read from the data sources of `sources`."""

__all__ = ["batches", "data_source", "loader", "random_state"]
