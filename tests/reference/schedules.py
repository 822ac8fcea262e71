"""Schedules by brute force: information sets as Python sets, every list of jobs tried."""

import itertools


class Case:
    """Sampled sequences with what heads would pick, looked up."""

    def __init__(self, components, x, active):
        self.components = components
        self.n = x.shape[1]
        self.samples = []
        for sequence, needed in zip(x, active, strict=True):
            tables = []
            for component in components:
                best = {}
                for row in itertools.product(range(self.n), repeat=component.arity):
                    best[row] = float(component.preference(sequence[list(row)]))
                tables.append(best)
            self.samples.append((tables, {t for t in range(self.n) if needed[t]}))

    def learned_by(self, layers):
        """Whether the schedule [(token jobs, CLS jobs)] holds the active set in every sample."""
        return all(self._holds(layers, tables, needed) for tables, needed in self.samples)

    def _holds(self, layers, tables, needed):
        sets = [{t} for t in range(self.n)] + [set()]
        for token_jobs, cls_jobs in layers:
            after = [set(held) for held in sets]
            for job in token_jobs:
                if self.components[job].arity == 2:
                    for t in range(self.n):
                        s = max(range(self.n), key=lambda s, t=t: tables[job][t, s])
                        after[t] |= sets[s]
                else:
                    s = self._pick(job, tables, sets)
                    for t in range(self.n):
                        after[t] |= sets[s]
            for job in cls_jobs:
                after[-1] |= sets[self._pick(job, tables, sets)]
            sets = after
        return needed <= sets[-1]

    def _pick(self, job, tables, sets):
        arity = self.components[job].arity

        def best_inside(s):
            return max(tables[job][row] for row in itertools.product(sets[s], repeat=arity))

        return max(range(self.n), key=best_inside)


def all_schedules(components, heads):
    """Every list of max-position jobs: each head of a layer has one, or none."""
    jobs = range(len(components))
    few = [j for j in jobs if components[j].arity <= 2]

    def choices(of, most):
        return [c for k in range(most + 1) for c in itertools.combinations(of, k)]

    layers = []
    for layer, h in enumerate(heads):
        token = [()] if layer == len(heads) - 1 else choices(few, h)
        layers.append(list(itertools.product(token, choices(jobs, h))))
    return itertools.product(*layers)
