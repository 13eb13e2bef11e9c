"""Imported by the process that others are forked from: with it they have what torch loads for
its first optimizer.
"""

import torch

torch.optim.SGD([torch.zeros(1)], lr=0.1)
