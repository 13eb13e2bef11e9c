"""The worker's decisions as pure state machines and values."""
