"""Value types of options, and sections of --help."""

from pscommon.settings import values
from pscommon.settings.values import ValueType

POLICIES = ("sync", "async", "ssp")
COUNT = ValueType("INTEGER", values.count, int)
COUNT_OR_NONE = ValueType("INTEGER", values.count_or_none, int)
VERSION = ValueType("INTEGER", values.version, int)
FOLDER = values.PathType(file_okay=False)
FILE = values.PathType(dir_okay=False)
SECONDS = ValueType("SECONDS", values.seconds, int, float)
LISTEN = ValueType("HOST:PORT", values.listening)
ADDRESS = ValueType("HOST:PORT", values.address)
MODULE = ValueType("MODULE", values.module)
TEXT = ValueType("TEXT", values.utf8)

PLACE = "Place"
JOB = "Job"
SNAPSHOTS = "Snapshots"
FAILOVER = "Failover"
LOCAL = "This process"
OUTPUT = "Output"
CLUSTER = "Cluster"
