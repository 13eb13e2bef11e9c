"""Commands to the coordinator: checked on arrival, recorded for replay, and queries that change
nothing.
"""
