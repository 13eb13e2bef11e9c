"""Run the job of a seed and print its updates and workers: python -m tests.sim.replay SEED"""

import sys

from tests.sim.scenario import Scenario
from tests.sim.world import World


def main() -> None:
    world = World(Scenario.for_seed(int(sys.argv[1])))
    print(world.scenario)
    try:
        world.run()
    finally:
        for apply in world.updates:
            pushes = [
                (c.key, [b.number for b in world.pushes[c.key].staged.batches])
                for c in apply.contributions
            ]
            print(f"version {apply.version}: {pushes}")
        for member in world.coordinator.membership:
            print(member, member.state, member.reason)


if __name__ == "__main__":
    main()
