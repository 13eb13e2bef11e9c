"""One script's run: its membership, open loops, statistics, reported values and phases."""
