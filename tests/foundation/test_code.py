"""Digests of the user's own code: what it does counts, with all that it calls."""

import copy
import functools
import importlib.util
import pickle
import sys

import cloudpickle
import pytest
import torch

from infoflow_lens.foundation.record import code_digest, is_own
from infoflow_lens.hooks import PositionsProbe

SOURCE = '''
import functools
import math
import torch
from infoflow_lens.hooks import Probe, combined, summed
import other_file

FACTOR = 2
WEIGHTS = torch.tensor([1.0, 2.0])
SEEN = []

def helper(x):
    return x * FACTOR

def larger(mine, others):
    return max(mine, others)

class Base(Probe):
    def scaled(self, x):
        return helper(x)

class Own(Base):
    """A text."""

    reads = ("pattern",)
    dims = ("layer",)
    total = summed()
    largest = combined(larger)
    share: float = 0.1

    def update(self, seen):
        SEEN.append(seen)
        rows = [self.scaled(WEIGHTS.sum()) for _ in range(3)]
        return {"total": sum(rows), "largest": other_file.elsewhere(1)}

    def compute(self):
        # a remark
        return self.total
'''
OTHER = "def elsewhere(x):\n    return x + 1\n"


@pytest.fixture
def digest_of(tmp_path, monkeypatch):
    """The digest of the class, from files with these words in the place of others."""
    monkeypatch.syspath_prepend(tmp_path)

    def get(*changes):
        texts = {"own_file": SOURCE, "other_file": OTHER}
        for old, new in changes:
            assert any(old in text for text in texts.values())
            texts = {name: text.replace(old, new) for name, text in texts.items()}
        for name in ("other_file", "own_file"):
            (tmp_path / f"{name}.py").write_text(texts[name])
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(texts[name], spec.origin, "exec"), vars(module))
        return code_digest(module.Own), module

    return get


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return self.total", "return self.total * 2"),
        ("FACTOR = 2", "FACTOR = 3"),
        ("x * FACTOR", "x + FACTOR"),  # in a function that the base calls
        ("return helper(x)", "return -helper(x)"),  # in the base
        ("[1.0, 2.0]", "[1.0, 2.5]"),
        ("x + 1", "x + 2"),  # in another file
        ("max(mine", "min(mine"),  # how two states become one
        ("combined(larger)", "combined(max)"),
        ('("pattern",)', '("scores",)'),
        ("range(3)", "range(4)"),
        ("share: float = 0.1", "share: float = 0.2"),
    ],
)
def test_other_code_has_another_digest(old, new, digest_of):
    assert digest_of((old, new))[0] != digest_of()[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a remark", "# another one\n"),
        ("A text", "Other words"),
        ("rows", "lines"),
        ("SEEN = []", "SEEN = [1]"),  # it changes while the code runs
        ("import math", "import math, json"),
    ],
)
def test_code_that_does_the_same_has_the_same_digest(old, new, digest_of):
    assert digest_of((old, new))[0] == digest_of()[0]


def test_a_run_changes_no_digest(digest_of):
    before, module = digest_of()
    module.SEEN.append(module)
    assert code_digest(module.Own) == before
    sent = cloudpickle.loads(cloudpickle.dumps(module.Own))
    assert code_digest(sent) == before


class Holder:
    """An object that is called."""

    def __init__(self, number):
        self.number, self.itself = number, self

    def __call__(self, x):
        return x * self.number


class Layer(torch.nn.Linear):
    """A module of the user's own; of PyTorch's all code of torch would be read."""


@functools.lru_cache
def cached(x):
    return x + 1


def make(number):
    def inner(x):
        return x * number

    return inner


def test_functions_and_objects():
    assert code_digest(make(1)) == code_digest(make(1)) != code_digest(make(2))
    assert code_digest(Holder(1)) == code_digest(Holder(1)) != code_digest(Holder(2))
    assert code_digest(Holder(1).__call__) != code_digest(Holder(2).__call__)
    assert code_digest(functools.partial(max, 1)) != code_digest(functools.partial(max, 2))
    assert code_digest(cached) == code_digest(copy.copy(cached))
    assert code_digest(torch.nn.Linear(2, 3)) != code_digest(Layer(2, 3))
    layer = Layer(2, 3)
    before = code_digest(layer)
    assert code_digest(pickle.loads(pickle.dumps(layer))) == before
    with torch.no_grad():
        layer.weight.add_(1)
    assert code_digest(layer) != before
    assert code_digest(lambda x: {x, "a", "b"} & {1, 2}) == code_digest(
        lambda x: {x, "a", "b"} & {1, 2}
    )


def test_objects_that_make_up_attributes_are_not_asked():
    """Those of torch's compiler warn of each name, which ends a run where warnings are errors."""

    class Anything:
        def __getattr__(self, name):
            raise UserWarning(f"undefined {name}")

    some = Anything()
    assert code_digest(lambda: some) == code_digest(lambda: some)


def test_what_is_the_users():
    own = [make, Holder, Holder(1).__call__]
    others = [PositionsProbe, torch.nn.Linear, torch.relu, max, len, copy.copy, pickle]
    assert all(map(is_own, own))
    assert not any(map(is_own, others))
    assert is_own(torch.nn.Linear, root="torch")
