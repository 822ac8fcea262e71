"""Splits that share nothing: by seed, by sequence, or by words and templates that are held out."""

from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import derive_seed

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
SHARES: dict[Split, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}


def split_sizes(n: int, least: int, what: str) -> dict[Split, int]:
    """Count the things of each split, of `n` in all: its share, but at least `least`.

    Raises:
        InfoFlowError: if there are too few.
    """
    # what rounding down leaves over goes to training
    held_out = {split: max(least, int(SHARES[split] * n)) for split in SPLITS[1:]}
    train = n - sum(held_out.values())
    if train < least:
        raise InfoFlowError(
            f"{n} {what} cannot be split: each of train, validation and test needs {least}, so "
            f"expected at least {3 * least}; raise the sizes, or draw with sample()"
        )
    return {"train": train, **held_out}


@lru_cache(maxsize=64)
def dealt_out(n: int, least: int, what: str, seed: int) -> dict[Split, Int[Tensor, " part"]]:
    """Return the numbers below `n`, dealt out to the splits at random, at least `least` to each.

    Raises:
        InfoFlowError: if there are too few.
    """
    sizes = split_sizes(n, least, what)
    generator = torch.Generator().manual_seed(derive_seed("holdout", what, seed))
    parts = torch.randperm(n, generator=generator).split([sizes[split] for split in SPLITS])
    return {split: part.sort().values for split, part in zip(SPLITS, parts, strict=True)}


def sequence_keys(x: Int[Tensor, "batch pos"], seed: int) -> np.ndarray:
    """Return a number from 0 to 2^64 - 1 for every sequence: equal ones alike,
    others as if at random.
    """
    keys = np.full(len(x), derive_seed("split", seed), dtype=np.uint64)
    for column in x.numpy().astype(np.uint64).T:
        # splitmix64 (Steele, Lea, Flood 2014), one round a token
        keys = (keys ^ column) + np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys ^= keys >> np.uint64(31)
    return keys


def key_range(split: Split, cuts: list[int]) -> tuple[np.uint64, np.uint64]:
    """Return the lowest and the highest key of the sequences of a split."""
    first = SPLITS.index(split)
    # both ends belong to the split, for 2^64 itself is no uint64
    return np.uint64(cuts[first]), np.uint64(cuts[first + 1] - 1)


def cuts_by_share() -> list[int]:
    """Return cuts of all keys, in the shares of the splits."""
    ends = np.cumsum(list(SHARES.values()))
    return [0, *(int(end * 2**60) << 4 for end in ends[:-1]), 2**64]


def cuts_by_count(keys: np.ndarray, what: str) -> list[int]:
    """Return cuts between the sorted keys of a small space, so that no split is empty.

    Raises:
        InfoFlowError: if there are too few sequences.
    """
    sizes = split_sizes(len(keys), 1, what)
    ends = np.cumsum([sizes[split] for split in SPLITS])
    return [0, *(int(np.sort(keys)[end]) for end in ends[:-1]), 2**64]
