"""What options are made of: the kinds of their values, and the sections of --help."""

from pscommon import values
from pscommon.values import Value

POLICIES = ("sync", "async", "ssp")
COUNT = Value("INTEGER", values.count, int)
COUNT_OR_NONE = Value("INTEGER", values.count_or_none, int)
VERSION = Value("INTEGER", values.version, int)
FOLDER = values.Place(file_okay=False)
FILE = values.Place(dir_okay=False)
SECONDS = Value("SECONDS", values.seconds, int, float)
LISTEN = Value("HOST:PORT", values.listening)
ADDRESS = Value("HOST:PORT", values.address)
MODULE = Value("MODULE", values.module)
TEXT = Value("TEXT", values.utf8)

PLACE = "Place"
JOB = "Job"
SNAPSHOTS = "Snapshots"
FAILOVER = "Failover"
LOCAL = "This process"
OUTPUT = "Output"
CLUSTER = "Cluster"
