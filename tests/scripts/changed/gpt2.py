"""GPT-2 built from a configuration, clipped by norm, 20 steps."""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import psworker


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    job = psworker.connect()
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=128,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    tokens = torch.cumsum(torch.randint(0, 5, (768, 32)), 1) % 128
    loader = job.batches(DataLoader(tokens[:640], batch_size=args.batch_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = job.optimizer(optimizer, model, clip_norm=1.0)
    model.train()
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=tokens[640:], labels=tokens[640:]).loss
    print(f"final loss {loss.item():.10f}")


if __name__ == "__main__":
    main()
