"""The data ledger: which worker computes on which batch, and which batches have counted."""
