"""Small jobs and their samples, for tests that train."""

import random
from collections.abc import Callable
from pathlib import Path

from elasticrec.config import Job

MakeJob = Callable[..., Job]
WriteSamples = Callable[..., Path]


def sample_lines(count: int, seed: int) -> list[str]:
    """Return learnable slot text with repeats, empty slots, a sign in two slots, weights and all kinds of counts."""
    chance = random.Random(seed)
    lines = []
    for _ in range(count):
        a, b = int(chance.paretovariate(0.7)) % 200, int(chance.paretovariate(0.7)) % 100
        probability = 0.8 if (7 * a + b) % 3 == 0 else 0.2
        show = 1 if chance.random() < 0.8 else chance.randint(2, 5)
        click = sum(chance.random() < probability for _ in range(show))
        fields = [f"{a}:0", *[f"{1000 + b}:1"] * chance.randint(1, 2), *[f"{a}:2"] * chance.randint(0, 1)]
        lines.append(f"{show} {click} {' '.join(fields)}")
    return lines
