"""Ratios of times, paired in one run."""

import statistics
import time
from collections.abc import Callable

ROUNDS = 5


def paired(ours: Callable[[], object], theirs: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median over rounds of the ratio of the two times, after one round of warming up."""
    ratios = []
    for _ in range(rounds + 1):
        times = []
        for function in (ours, theirs):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios[1:])
