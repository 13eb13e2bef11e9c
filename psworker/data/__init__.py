"""The data loader: batches leased from the ledger, read from map-style data sets or from
streams.
"""
