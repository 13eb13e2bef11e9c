"""One file a contender: run as `python -m benchmarks.contenders.NAME SETUP`, it talks as
benchmarks.speaker says.
"""
