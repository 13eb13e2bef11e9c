"""ps-run: a whole cluster on this machine in one command."""
