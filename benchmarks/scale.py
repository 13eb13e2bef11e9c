"""How much of everything: the full run, the quick one, and one so small that tests can afford
it.
"""

from dataclasses import dataclass

from benchmarks.setup import BYTES_PER_MEGABYTE


@dataclass(frozen=True)
class Scale:
    """Sizes in bytes. small_pieces, pulls, steps, pushes, logged: pieces of work in one turn.
    growth: numbers of workers. networks: of benchmarks.networks.

    tensorflow: the Python of an environment that has it; empty: TensorFlow is left out, because
    of `no_tensorflow`.
    """

    name: str
    rounds: int
    large: int = 100 * BYTES_PER_MEGABYTE
    small: int = 50_000
    small_pieces: int = 200
    many: int = 40 * BYTES_PER_MEGABYTE
    many_tensors: int = 10_000
    memory_nbytes: int = 400 * BYTES_PER_MEGABYTE
    in_flight: int = 800 * BYTES_PER_MEGABYTE
    memory_steps: int = 20
    crowd: int = 64
    crowd_rounds: int = 3
    medium: int = 4 * BYTES_PER_MEGABYTE
    pulls: int = 300
    saved_steps: int = 20
    logged: int = 9
    pushes: int = 192
    growth: tuple[int, ...] = (1, 2, 4, 8, 16)
    joint: int = 10 * BYTES_PER_MEGABYTE
    networks: tuple[str, ...] = ("mlp", "cnn", "small")
    network_steps: int = 10
    sizes: tuple[tuple[int, ...], ...] = ((10**3, 10**4, 10**5, 10**6), (10**7, 10**8), (10**9,))
    link_megabits: int = 200
    linked: int = 5 * BYTES_PER_MEGABYTE
    linked_steps: int = 5
    trained: int = 40 * BYTES_PER_MEGABYTE
    tensorflow: str = ""
    no_tensorflow: str = "no environment with TensorFlow; make bench-tf makes one"


FULL = Scale("full", rounds=11)
QUICK = Scale(
    "quick",
    rounds=7,
    small_pieces=100,
    pulls=100,
    growth=(1, 2, 4),
    networks=("mlp",),
    network_steps=3,
    no_tensorflow="not in a quick run",
)
TINY = Scale(
    "tiny",
    rounds=2,
    large=2 * BYTES_PER_MEGABYTE,
    small_pieces=3,
    many=400_000,
    many_tensors=100,
    memory_nbytes=BYTES_PER_MEGABYTE,
    in_flight=4 * BYTES_PER_MEGABYTE,
    memory_steps=2,
    crowd=3,
    crowd_rounds=2,
    medium=400_000,
    pulls=5,
    saved_steps=2,
    logged=2,
    pushes=4,
    growth=(1, 2),
    joint=400_000,
    networks=("small",),
    network_steps=1,
    sizes=((1_000,), (BYTES_PER_MEGABYTE,), (2 * BYTES_PER_MEGABYTE,)),
    linked=200_000,
    linked_steps=2,
    trained=200_000,
    no_tensorflow="not in a tiny run",
)
SCALES = {scale.name: scale for scale in (FULL, QUICK, TINY)}
