"""A small GPT without a data loader: random windows of a text, accumulation, a cosine rate set
by hand.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import psworker

CONTEXT, WIDTH, VOCABULARY = 24, 32, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    job = psworker.connect()
    torch.manual_seed(1)
    text = torch.cumsum(torch.randint(0, 3, (4096,)), 0) % VOCABULARY
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    optimizer = job.optimizer(optimizer, model, clip_norm=1.0)
    torch.manual_seed(1337 + job.rank)

    def get_batch(size):
        starts = torch.randint(len(text) - CONTEXT - 1, (size,)).tolist()
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        return windows[:, :-1], windows[:, 1:]

    for step in range(args.steps):
        rate = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(2):
            loss = model(*get_batch(args.batch_size)) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        torch.manual_seed(7)
        loss = model(*get_batch(256))
    print(f"final loss {loss.item():.10f}")


if __name__ == "__main__":
    main()
