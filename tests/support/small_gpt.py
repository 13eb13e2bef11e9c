"""A small GPT-2 without dropout, with tied embedding and output layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LENGTH, WIDTH, HEADS, BLOCKS = 97, 24, 48, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        )
        heads = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.c_proj(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        logits: Tensor = self.lm_head(self.ln_f(self.h(x)))
        return logits


def small_gpt() -> nn.Module:
    """Return a model with fixed initial values as in GPT-2's paper."""
    model, generator = Gpt(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            elif "ln_" not in name:
                parameter.zero_()
    return model


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of predicting each next token; samples have equal lengths."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def text(samples: int) -> Tensor:
    """Return noisy token sequences that follow a rule."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randint(0, WORDS, (samples, 1), generator=generator)
    step = torch.randint(1, 4, (samples, 1), generator=generator)
    noise = torch.randint(0, 2, (samples, LENGTH), generator=generator)
    return (start + step * torch.arange(LENGTH) + noise) % WORDS
