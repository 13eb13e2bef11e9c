"""What servers, workers and tools share: the model and its placement, the wire, snapshots,
errors, logs.
"""

import os

# gRPC reads its environment once, when it is imported: so this is set before anything of ours can
# import it. Who has set one of these already needs it otherwise.  gRPC's own care for forks stops
# its threads around each fork, which can hang, and writes to stderr. Children that leave gRPC alone
# (a DataLoader's) need none of it; the others are refused (wire/endpoint.py).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# A server's sockets are read by the threads that wait for calls, as before gRPC's "event engine",
# whose threads hand each message on to them: 100 MB there and back take a tenth less time, a small
# call 3 to 6 % (grpcio 1.85, two cores, in turns). For connections that a process opens itself
# there is such a switch too, worth another 5 %; but then they come back 14 s after a network does,
# instead of 1.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
# It would write a line to stderr for each handshake that fails: anyone could fill a disk.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
