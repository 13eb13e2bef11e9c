"""What a contender is asked to do; travels to it as one JSON argument."""

import json
from dataclasses import asdict, dataclass

BYTES_PER_MEGABYTE = 1_000_000
RATES = {"sgd": 0.1, "adam": 0.001}
"""Learning rates. With gradients that are all 1, a step of either moves every weight down by
that much.
"""


@dataclass(frozen=True)
class Setup:
    """One piece of work.

    nbytes: of the model. model: "resnet", or how many equal tensors. pieces: done in one turn;
    more where one is too short to be timed. servers, workers, policy, lanes: of a job of ours;
    lanes is "grpc" or "shm". in_flight: the servers' budget in bytes; 0 leaves the default.
    clients: in each worker's process, where one stands for many. batch: samples a step, where a
    network is really trained. network: which of benchmarks.networks; empty: layers of equal size.
    overlap: push while gradients are still being computed.
    durability: "snapshot" or "log", on a disk; empty: nothing is written. fsync: of the log.
    tls: folder with certificates of `ps-ctl tls init`; empty: plain text. standby: of the only
    server. clips: updates keep to a clip norm, which none exceeds.
    """

    nbytes: int
    model: str = "resnet"
    optimizer: str = "sgd"
    pieces: int = 1
    servers: int = 1
    workers: int = 1
    policy: str = "sync"
    lanes: str = "grpc"
    in_flight: int = 0
    clients: int = 1
    batch: int = 64
    network: str = ""
    overlap: bool = False
    durability: str = ""
    fsync: str = "everysec"
    tls: str = ""
    standby: bool = False
    clips: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Setup":
        return Setup(**json.loads(text))

    @property
    def clip_norm(self) -> float | None:
        return 1e9 if self.clips else None

    @property
    def rate(self) -> float:
        return RATES[self.optimizer]
