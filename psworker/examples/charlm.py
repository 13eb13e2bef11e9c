"""A small transformer learns to write Python, byte by byte, from Python's standard library.

ps-run --servers 2 --workers 2 -m psworker.examples.charlm
PS_LOCAL=1 python -m psworker.examples.charlm                 # the same training without servers
"""

# mypy: allow-untyped-calls

import argparse
import logging
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import psworker

log = logging.getLogger("charlm")

CONTEXT_BYTES = 64


def source_text(nbytes: int) -> bytes:
    """Return the first `nbytes` of the standard library's modules, in the order of their names."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= nbytes:
            break
    return text[:nbytes]


def windows(text: bytes) -> Tensor:
    """Return the text as rows of CONTEXT_BYTES + 1 bytes, int64[n, CONTEXT_BYTES + 1].

    The model predicts each byte of a row from those before it.
    """
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)
    return symbols.unfold(0, CONTEXT_BYTES + 1, CONTEXT_BYTES)


class Transformer(nn.Module):
    """A causal transformer over bytes; its embedding is also its output layer (tied weights)."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.letter = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT_BYTES, width)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.out = nn.Linear(width, 256, bias=False)
        self.out.weight = self.letter.weight
        for embedding in (self.letter, self.place):
            nn.init.normal_(embedding.weight, std=0.1)
        self.register_buffer(
            "future",
            nn.Transformer.generate_square_subsequent_mask(CONTEXT_BYTES),
            persistent=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the next bytes.

        Args:
            x: Bytes, int64[batch, CONTEXT_BYTES].

        Returns:
            float32[batch, CONTEXT_BYTES, 256]: for each byte, logits of the byte after it.
        """
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = self.layers(
            self.letter(x) + self.place(positions), mask=self.future, is_causal=True
        )
        logits: Tensor = self.out(hidden)
        return logits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bytes", type=int, default=300_000, help="size of the training text")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)

    with psworker.connect() as job:
        model = Transformer().to(job.device)
        optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=args.lr), model)

        smooth = 0.0
        for batch in job.batches(
            windows(source_text(args.bytes)), args.batch_size, args.epochs, seed=args.seed
        ):
            x, y = batch[:, :-1].to(job.device), batch[:, 1:].to(job.device)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            smooth = 0.95 * smooth + 0.05 * loss.item() if smooth else loss.item()
            if job.stats.steps % 20 == 0:
                log.info("step %d, version %d: loss %.3f", job.stats.steps, job.version, smooth)
                job.report(loss=smooth)

        log.info(
            "done after %d versions: loss %.3f (nats a byte; guessing at random is 5.545)",
            job.version,
            smooth,
        )
        job.report(loss=smooth)


if __name__ == "__main__":
    main()
