"""A recurrent language model over synthetic text, with clipped gradients."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import psworker

WORDS, LENGTH = 64, 12


class Text(Dataset):
    """Windows of a text in which each word decides the chances of the next one."""

    def __init__(self, windows, seed):
        generator = torch.Generator().manual_seed(seed)
        chances = torch.Generator().manual_seed(9)
        table = torch.softmax(torch.randn(WORDS, WORDS, generator=chances) * 2.5, dim=1)
        words = [0]
        for _ in range(windows * LENGTH):
            words.append(torch.multinomial(table[words[-1]], 1, generator=generator).item())
        self.words = torch.tensor(words)
        self.windows = windows

    def __len__(self):
        return self.windows

    def __getitem__(self, index):
        start = index * LENGTH
        return self.words[start : start + LENGTH], self.words[start + 1 : start + LENGTH + 1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.rnn = nn.LSTM(32, 32, batch_first=True)
        self.decoder = nn.Linear(32, WORDS)
        self.decoder.weight = self.embedding.weight

    def forward(self, words):
        output, _ = self.rnn(self.embedding(words))
        return self.decoder(output)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    job = psworker.connect()
    torch.manual_seed(1)
    model = Model()
    criterion = nn.CrossEntropyLoss()
    train_loader = job.batches(DataLoader(Text(512, seed=1), batch_size=args.batch_size))
    test_loader = DataLoader(Text(128, seed=2), batch_size=128)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    optimizer = job.optimizer(optimizer, model, clip_norm=0.25)
    best = math.inf
    for _ in range(args.epochs):
        model.train()
        for words, following in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(words).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for words, following in test_loader:
                loss = criterion(model(words).flatten(0, 1), following.flatten()).item()
        if loss > best:
            optimizer.param_groups[0]["lr"] /= 4.0
        best = min(best, loss)
    print(f"final loss {loss:.10f}")


if __name__ == "__main__":
    main()
