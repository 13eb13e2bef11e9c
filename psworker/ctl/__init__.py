"""ps-ctl: looking at a job and its snapshots, and ending it, for people and for scripts."""
