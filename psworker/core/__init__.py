"""The worker's decisions as pure machines."""
