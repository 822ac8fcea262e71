"""Every setting of every task, construction and config is of its type and range, or refused."""

import inspect
import math
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest
import torch

from infoflow_lens import Architecture, InfoFlowError, flow, load_task
from infoflow_lens.foundation.modules import SeededRandom
from infoflow_lens.models.architecture import TokenArchitecture
from infoflow_lens.models.host import build_model, build_token_model
from infoflow_lens.probing.config import ProbingConfig, SurveyConfig
from infoflow_lens.probing.data import stream_data
from infoflow_lens.runs.executor import Executor
from infoflow_lens.studies.constructions import CONSTRUCTIONS
from infoflow_lens.studies.demo import DemoConfig
from infoflow_lens.studies.language_model.config import LanguageModelConfig
from infoflow_lens.studies.language_model.config import preset as language_model_preset
from infoflow_lens.studies.language_model.ngram import NGram
from infoflow_lens.tasks import list_tasks
from infoflow_lens.training import TrainingConfig, evaluate

NUMBER_TOO_FAR = (-1, -1.0, math.nan, math.inf)
SIZES = {"n_heads": (4, 2), "d_model": 12, "d_token": 3, "n_tokens": 5}
TOKEN_SIZES = {"n_heads": (4, 2), "d_model": 12, "d_head": 3, "n_tokens": 5, "d_vocab": 7}
TOKEN_SIZES["d_output"] = 2


FREE_TEXTS = {"model", "data", "column", "device", "dtype"}  # any word may be one
FROM_THE_LAST = {"position", "layer", "without"}  # which -1 may be


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


def flow_of_a_tiny_model() -> Named:
    """`flow`, whose settings are its arguments."""
    architecture = Architecture(n_heads=(1, 1), d_model=4, d_token=2, n_tokens=9, d_mlp=0)
    model, inputs = build_model(architecture), torch.randn(1, 9, 2)
    values = {
        "position": 2, "layer": (0, 1), "influence": "exact", "rule": "top_k", "k": 1,
        "without": (0,), "n_directions": 3, "threshold": 0.5, "max_length": 9, "seed": 1,
    }  # fmt: skip
    return Named(lambda **own: flow(model, inputs, progress=False, **own), **values)


CONFIGS: dict[str, Config] = {
    "ProbingConfig": Config(
        ProbingConfig,
        model="stdlib-2l",
        data="repeated",
        probes=("positions", "recovery"),
        column="text",
        n=9,
        max_length=8,
        window=8,
        without=(1,),
        sketch=2,
        metric="kl",
        dtype="float32",
    ),
    "SurveyConfig": Config(
        SurveyConfig, model="stdlib-2l", data="a.txt", column="text", dtype="float32"
    ),
    "LanguageModelConfig": Config(LanguageModelConfig),
    "language model preset": Named(
        lambda preset: language_model_preset(preset), preset="stdlib-2l"
    ),
    "DemoConfig": Config(DemoConfig),
    "flow": flow_of_a_tiny_model(),
    "SeededRandom": Named(SeededRandom, seed=3),
    "Executor": Named(lambda **own: Executor(**own).check("a test"), jobs=1, n_threads=1),
    "NGram": Named(lambda **own: NGram(torch.arange(4), **own), vocabulary=4, order=2),
    "stream_data": Named(
        lambda **own: stream_data(None, "repeated", **own),
        column="text",
        n=3,
        max_length=8,
        window=8,
        seed=1,
    ),
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


def wrong(name: str, default: Any) -> list[Any]:
    """Values that are of no setting with this name and default."""
    number = [*NUMBER_TOO_FAR, "3", "1e-3", "no"]
    if isinstance(default, bool):
        return ["no", 0, 1, 1.0]
    if isinstance(default, int):
        given = [True, 2.5, np.float64(2), *number]
        return given if name not in FROM_THE_LAST else [v for v in given if v != -1]
    if isinstance(default, float):
        return [True, 10**400, *number]
    if isinstance(default, str):
        return [True, 3, *([] if name in FREE_TEXTS else ["nonsense"])]
    if isinstance(default, tuple):
        return ["12", (True,), (1.5,), ("1",), {1: 2}, *([] if name in FROM_THE_LAST else [(-1,)])]
    return ["nonsense", {}]


@EACH
def test_a_value_of_another_type_or_range_is_refused_by_name(config, name, default):
    for value in [object(), *wrong(name, default)]:
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


def test_settings_of_tasks_and_of_training():
    assert load_task("d_retrieval", n_tokens=np.int64(8)) == load_task("d_retrieval", n_tokens=8)
    for settings in ({"epochs": True}, {"lr": "1e-3"}, {"batch_size": True}, {"momentum": "0"}):
        with pytest.raises(InfoFlowError, match=next(iter(settings))):
            TrainingConfig(**settings)
    with pytest.raises(InfoFlowError, match="batch_size is '64'"):
        evaluate(None, None, batch_size="64")
