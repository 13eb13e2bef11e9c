"""Program: a Ray cluster of two nodes on this host, which prints its address.

SIGUSR1 removes the second node as if its machine were lost; SIGTERM ends the cluster. The nodes
have the same address, 127.0.0.1.
"""

import os
import signal
import sys

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise the address of the host is used
    "RAY_enable_metrics_collection": "0",
}
MEMORY_BYTES = 100 << 20
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def main(cpus: int) -> None:
    """Run a cluster whose nodes have these CPUs until SIGTERM."""
    os.environ.update(VARIABLES)
    from ray.cluster_utils import Cluster

    size = {"num_cpus": cpus, "object_store_memory": MEMORY_BYTES}
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=size)
    second = cluster.add_node(**size)
    cluster.wait_for_nodes()
    print(f"cluster at {cluster.address}", flush=True)
    while signal.sigwait(SIGNALS) == signal.SIGUSR1:
        cluster.remove_node(second, allow_graceful=False)
        print("the second node is lost", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
