"""Imports for the fork server: creating an optimizer loads more modules of torch."""

import torch

torch.optim.SGD([torch.zeros(1)], lr=0.1)
