"""The data ledger: which worker computes which batch, and which batches have counted."""

__all__ = ["data_ledger", "loop", "map_loop", "resume_rules", "stream_loop"]
