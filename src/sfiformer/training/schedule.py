"""The learning rate of each epoch."""

import math

from sfiformer.config import OptimConfig


def learning_rate(settings: OptimConfig, epochs: int, epoch: int) -> float:
    """Of epoch 0 … epochs - 1: a linear warm-up, then half a cosine.

    lr·(e + 1)/w                       for e < w, the warm-up epochs
    lr·½(1 + cos π (e − w)/(E − w))    after it, with E epochs in all; it would be 0 in epoch E
    """
    warmup = settings.warmup_epochs
    if epoch < warmup:
        return settings.lr * (epoch + 1) / warmup
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / max(epochs - warmup, 1)))
