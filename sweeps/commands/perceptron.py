"""A perceptron, as a model for hpcbench's strategies and for the script beside it."""

import math

from torch import nn


def build(in_shape, outputs, width=2048):
    """Return the model as a sequence of blocks."""
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(math.prod(in_shape), width), nn.ReLU()),
        nn.Sequential(nn.Linear(width, width), nn.ReLU()),
        nn.Sequential(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, outputs),
    )
