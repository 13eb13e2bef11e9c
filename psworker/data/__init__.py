"""The data loader: batches leased from the ledger, read from a data source."""

__all__ = ["batches", "data_source", "loader", "parquet", "random_state"]
