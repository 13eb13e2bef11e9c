"""Least squares with numpy alone, by `psworker.Client`, which works with any framework.

ps-run --servers 2 --workers 2 -m psworker.examples.linear
"""

import argparse

import numpy as np

import psworker

FEATURE_COUNT = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="per worker")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    truth = np.random.default_rng(0).normal(size=FEATURE_COUNT)

    with psworker.Client() as client:
        params = {"w": np.zeros(FEATURE_COUNT), "b": np.zeros(())}
        client.register(params, psworker.OptimizerSpec("sgd", lr=args.lr))
        client.pull(out=params)

        rng = np.random.default_rng(client.worker)  # every worker has different data
        for _ in range(args.steps):
            x = rng.normal(size=(args.batch_size, FEATURE_COUNT))
            y = x @ truth + 3 + rng.normal(scale=0.01, size=args.batch_size)
            error = x @ params["w"] + params["b"] - y
            grads = {"w": x.T @ error / args.batch_size, "b": error.mean()}
            client.push_pull(grads, out=params, samples=args.batch_size)

        distance = float(np.hypot(np.linalg.norm(params["w"] - truth), params["b"] - 3))
        client.report(distance=distance)
        print(
            f"worker {client.worker}, version {client.version}: distance to the true weights "
            f"{distance:.5f}"
        )


if __name__ == "__main__":
    main()
