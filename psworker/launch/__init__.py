"""Starting, watching and restarting processes on this machine, and running a training script."""
