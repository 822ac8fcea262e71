"""The identity of a probe run, and the tables that it writes."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infoflow_lens.agreement import compare_by_position
from infoflow_lens.foundation.files import write_text
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.packages import versions_identity
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.data import data_identity
from infoflow_lens.probing.findings import Findings

# Settings on which no number depends: the names of model and data, whose contents have digests,
# the device, and what the page shows. The digests of weights and configuration tell the precision
# and the host that were used, however they were asked for: "float32" is what None gives.
_OF_SEQUENCES = ("column", "n", "max_length", "window")
_OF_MODEL = ("dtype", "backend")
_IGNORED_SETTINGS = ("model", "data", *_OF_SEQUENCES, *_OF_MODEL, "device", "n_shown")

_WORDS_OF_MODEL = {
    "model": "the model's weights",
    "configuration": "the model's configuration and code",
    "hooks": "your own hooks on the model",
}


def settings_identity(config: ProbingConfig) -> dict[str, Any]:
    """Return the settings on which numbers depend, by what errors call them."""
    settings = asdict(config).items()
    return {f"settings ({name})": v for name, v in settings if name not in _IGNORED_SETTINGS}


def run_identity(
    config: ProbingConfig,
    model: Mapping[str, Any],
    inputs: str,
    tokenizer: str | None,
    code: Mapping[str, str],
) -> dict[str, Any]:
    """Return what the numbers of a run depend on, named as in errors: contents, never paths.

    Args:
        config: the settings.
        model: what its numbers depend on (:func:`~infoflow_lens.hooks.model.identity`).
        inputs, tokenizer: digests of the data, and of the tokenizer's words and rules.
        code: digests of parts and probes of the user's own, by name.
    """
    return {
        **{words: model[name] for name, words in _WORDS_OF_MODEL.items()},
        "the tokenizer's words and rules": tokenizer,
        "the data": inputs,
        "the code of your own probes": dict(code),
        **settings_identity(config),
        **versions_identity(),
        "what the model gives": model["outputs"],  # last: it follows from all others
    }


def sequences_identity(
    config: ProbingConfig, configuration: str, tokenizer: str | None
) -> dict[str, Any] | None:
    """Return what tokenised sequences depend on, to know whether they can be reused; None if
    unknown.

    Args:
        config: the settings.
        configuration, tokenizer: digests of the model's configuration and code, and of the
            tokenizer's words and rules.
    """
    data = data_identity(config.data)
    if data is None:
        return None
    settings = {name: getattr(config, name) for name in _OF_SEQUENCES}
    model = {"configuration": configuration, "tokenizer": tokenizer}
    return {"data": data, **settings, **model, **versions_identity()}


def write_tables(out: Path, result: Findings) -> None:
    """A csv for every result."""
    tables = {name: part.table(result.found[name]) for name, part in result.parts.items()}
    tables["capabilities"] = result.capabilities.to_frame()
    # tables that compare what is predicted and what is measured
    if result.influence is not None:
        tables["agreement"] = pd.concat(
            [
                agreement.to_frame().assign(rule=name)
                for name, agreement in result.agreement.items()
            ],
            ignore_index=True,
        )
        tables["agreement_by_position"] = pd.concat(
            [
                compare_by_position(sets, result.influence).assign(rule=name)
                for name, sets in result.predicted.items()
            ],
            ignore_index=True,
        )
        tables["explained"] = pd.DataFrame(
            {"rule": rule, **found.to_dict()} for (_, rule), found in result.explained.items()
        )
    if result.curve is not None:
        tables["coverage_curve"] = result.curve.to_frame()
    for name, table in tables.items():
        write_text(out / f"{name}.csv", table.to_csv(index=False))
