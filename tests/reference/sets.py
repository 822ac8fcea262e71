"""Rule (1) with Python sets, as the paper writes it."""


def propagate(positions, n_sources):
    """positions[layer][head][pos][rank]; returns [layer][pos] -> set."""
    n_pos = len(positions[0][0])
    current = [{t} if t < n_sources else set() for t in range(n_pos)]
    layers = []
    for heads in positions:
        following = []
        for t in range(n_pos):
            union = set(current[t])
            for head in heads:
                for s in head[t]:
                    if s >= 0:
                        union |= current[s]
            following.append(union)
        current = following
        layers.append(current)
    return layers
