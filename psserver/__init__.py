"""The parameter server: one shard of the weights, and on shard 0 the coordinator."""

import pscommon as pscommon  # before gRPC, which reads the environment when it is imported
