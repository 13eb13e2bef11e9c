"""The coordinator's decisions: update rounds, policies, snapshots, resharding, and the log of
entries.
"""
