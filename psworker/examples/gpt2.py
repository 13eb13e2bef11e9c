"""Hugging Face's GPT-2, built from a configuration, learns to write Python, byte by byte.

ps-run --servers 2 --workers 2 -m psworker.examples.gpt2
PS_LOCAL=1 python -m psworker.examples.gpt2                   # the same training without servers

Needs transformers: pip install 'paramserver[transformers]'
"""

# mypy: allow-untyped-calls

import argparse
import logging

import torch
from torch import nn

import psworker
from psworker.examples.charlm import CONTEXT_BYTES, source_text, windows

log = logging.getLogger("gpt2")


def gpt2(width: int = 64, layers: int = 2, heads: int = 4) -> nn.Module:
    """Return an untrained GPT-2 over bytes, with tied input and output embeddings."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise SystemExit(
            "this example needs transformers: pip install 'paramserver[transformers]'"
        ) from None
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT_BYTES + 1,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    network: nn.Module = GPT2LMHeadModel(config)
    return network


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bytes", type=int, default=300_000, help="size of the training text")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)

    with psworker.connect() as job:
        model = gpt2().to(job.device)
        adam = torch.optim.AdamW(model.parameters(), lr=args.lr)
        optimizer = job.optimizer(adam, model, clip_norm=1.0)

        rows = windows(source_text(args.bytes))
        for batch in job.batches(rows, args.batch_size, args.epochs, seed=args.seed):
            tokens = batch.to(job.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.report(loss=loss)
            if job.stats.steps % 20 == 0:
                at = (job.stats.steps, job.version, loss.item())
                log.info("step %d, version %d: loss %.3f", *at)


if __name__ == "__main__":
    main()
