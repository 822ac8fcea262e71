"""The k-th largest of a row by sorting."""

import math


def rank(row, ranks):
    """For each rank (position, margin, ties); masked keys are -inf; lowest index first."""
    allowed = sorted((s for s in range(len(row)) if row[s] > -math.inf), key=lambda s: (-row[s], s))
    result = []
    for k in ranks:
        if k > len(allowed):
            result.append((-1, math.nan, 0))
            continue
        here = allowed[k - 1]
        margin = row[here] - row[allowed[k]] if k < len(allowed) else math.inf
        ties = sum(row[s] == row[here] for s in allowed) - 1
        result.append((here, margin, ties))
    return result
