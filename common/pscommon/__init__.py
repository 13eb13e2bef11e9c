"""What servers, workers and tools share: the model and its placement, the wire, snapshots, errors, logs."""
