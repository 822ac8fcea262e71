"""Every setting of every task, construction and config is of its type and range, or refused."""

import inspect
import math
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest

from infoflow_lens import Architecture, InfoFlowError, TrainingConfig, list_tasks, load_task
from infoflow_lens.models.architecture import TokenArchitecture
from infoflow_lens.models.constructions import CONSTRUCTIONS
from infoflow_lens.models.host import build_token_model
from infoflow_lens.training import evaluate

NUMBER_TOO_FAR = (-1, -1.0, math.nan, math.inf)
SIZES = {"n_heads": (4, 2), "d_model": 12, "d_token": 3, "n_tokens": 5}
TOKEN_SIZES = {"n_heads": (4, 2), "d_model": 12, "d_head": 3, "n_tokens": 5, "d_vocab": 7}
TOKEN_SIZES["d_output"] = 2


class Config:
    """A class of settings, with values for those without defaults and for those that are None."""

    def __init__(self, make: Any, **values: Any) -> None:
        self.make, self.values = make, values

    def __call__(self, **changes: Any) -> Any:
        return self.make(**{**self.values, **changes})

    def defaults(self) -> dict[str, Any]:
        given = {item.name: item.default for item in fields(self.make)}
        return {**given, **self.values}


class Named(Config):
    """A task or a construction."""

    def defaults(self) -> dict[str, Any]:
        return self.values


def construction(name: str) -> Named:
    """A construction, built for a small task."""
    sizes = {
        "memorization": {"n_words": 3, "length": 2, "n_sequences": 3},
        "in_context_qa": {"n_questions": 3, "n_answers": 3, "n_pairs": 2},
        "template_matching": {"n_words": 4},
        "in_context_template_matching": {"n_words": 3, "length": 2, "n_answers": 3},
        "nested_qa": {"n_entities": 6, "hops": 2},
    }
    known = CONSTRUCTIONS[name]
    task = load_task(known.task, **sizes.get(known.task, {}))
    return Named(lambda **own: known.build(task, **own), **known.parameters)


def token_model() -> Named:
    known = inspect.signature(build_token_model).parameters
    defaults = {name: p.default for name, p in known.items() if p.default is not inspect._empty}
    del defaults["device"]
    return Named(build_token_model, **{**defaults, **TOKEN_SIZES, "n_layers": 2})


CONFIGS: dict[str, Config] = {
    "Architecture": Config(Architecture, **SIZES, d_head=(3, 6), d_encoder=4, attn_scale=0.5),
    "TokenArchitecture": Config(TokenArchitecture, **TOKEN_SIZES),
    "TrainingConfig": Config(TrainingConfig, patience=3, stop_below=0.1),
    "build_token_model": token_model(),
    **{
        f"task {name}": Named(lambda name=name, **own: load_task(name, **own), **task.parameters())
        for name, task in ((name, load_task(name)) for name in list_tasks())
    },
    **{f"construction {name}": construction(name) for name in CONSTRUCTIONS},
}
FIELDS = [
    (config, name, default)
    for config, made in CONFIGS.items()
    for name, default in made.defaults().items()
    if default is not MISSING
]
EACH = pytest.mark.parametrize(("config", "name", "default"), FIELDS, ids=lambda value: str(value))


def wrong(default: Any) -> list[Any]:
    """Values that are of no setting with this default."""
    number = [*NUMBER_TOO_FAR, "3", "1e-3", "no"]
    if isinstance(default, bool):
        return ["no", 0, 1, 1.0]
    if isinstance(default, int):
        return [True, 2.5, np.float64(2), *number]
    if isinstance(default, float):
        return [True, 10**400, *number]
    if isinstance(default, str):
        return ["nonsense", True, 3]
    if isinstance(default, tuple):
        return ["12", (True,), (1.5,), ("1",), (-1,), {1: 2}]
    return ["nonsense", {}]


@EACH
def test_a_value_of_another_type_or_range_is_refused_by_name(config, name, default):
    for value in [object(), *wrong(default)]:
        with pytest.raises(InfoFlowError, match=rf"^(\w+, )?{name} (is|are|has) ") as caught:
            CONFIGS[config](**{name: value})
        assert "expected" in str(caught.value), value


def twins(value: Any) -> list[Any]:
    """The same number in NumPy."""
    if isinstance(value, bool):
        return [np.bool_(value)]
    if isinstance(value, int):
        return [np.int64(value), np.array(value)]
    if isinstance(value, float):
        return [np.float64(value)]
    if isinstance(value, tuple) and all(isinstance(part, int) for part in value):
        return [np.array(value), list(map(np.int32, value))]
    return []


@EACH
def test_numbers_of_numpy_count_as_what_they_hold(config, name, default):
    for value in twins(default):
        made = CONFIGS[config](**{name: value})
        if hasattr(made, name) and not isinstance(CONFIGS[config], Named):
            kept = getattr(made, name)
            assert kept == default
            assert type(kept) is type(default)


def test_findings_of_the_last_look():
    """Accepted and wrong, raw TypeErrors, and refused though right (finding W10)."""
    assert load_task("d_retrieval", n_tokens=np.int64(8)) == load_task("d_retrieval", n_tokens=8)
    for settings in ({"epochs": True}, {"lr": "1e-3"}, {"batch_size": True}, {"momentum": "0"}):
        with pytest.raises(InfoFlowError, match=next(iter(settings))):
            TrainingConfig(**settings)
    with pytest.raises(InfoFlowError, match="batch_size is '64'"):
        evaluate(None, None, batch_size="64")
