"""The folder of a run: whose results it holds, and what is in it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infoflow_lens.agreement import compare_by_position
from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import read_signed, write_signed, write_text
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.probing.config import ProbingConfig

if TYPE_CHECKING:
    from infoflow_lens.probing.result import ProbingResult


_SCHEMA = "infoflow-lens probe 1"
# Versions that are recorded, and that no number of a run depends on.
_OF_NO_NUMBER = ("python", "datasets")


def check_folder(out: Path, config: ProbingConfig) -> None:
    """Refuse a folder with results of other settings, before the model is loaded.

    Raises:
        InfoFlowError: naming the settings that differ, or a spoiled record.
    """
    before = _record_in(out)
    if before is None:
        return
    now = json.loads(json.dumps(asdict(config)))
    settings = before.get("config")
    settings = settings if isinstance(settings, dict) else {}
    differing = [name for name in now if settings.get(name) != now[name]]
    if differing:
        changes = ", ".join(f"{name} {settings.get(name)!r} -> {now[name]!r}" for name in differing)
        raise InfoFlowError(
            f"{str(out)!r} holds results of other settings ({changes}): expected the same, to go "
            "on, or another folder"
        )


def claim_folder(out: Path, record: RunRecord) -> dict[str, Any]:
    """Write the record, or refuse if what the numbers depend on has changed since.

    Returns:
        The record as JSON-compatible values, for the parts to carry.

    Raises:
        InfoFlowError: naming what changed.
    """
    now: dict[str, Any] = json.loads(json.dumps(record.to_dict()))
    before = _record_in(out)
    if before is not None:
        check_same_run(before, now, out)
    write_signed(out / "record.json", _SCHEMA, now)
    return now


def _record_in(out: Path) -> dict[str, Any] | None:
    path = out / "record.json"
    if not path.is_file():
        return None
    hint = "expected what this version wrote; delete it, which keeps the results, or the folder"
    return read_signed(path, _SCHEMA, "record of a run", hint)


def check_same_run(before: Mapping[str, Any] | None, now: Mapping[str, Any], where: Path) -> None:
    """Refuse to go on from what belongs to a run on whose numbers something else told.

    Args:
        before: the record that was written.
        now: the record of this run.
        where: the file or folder.

    Raises:
        InfoFlowError: naming what changed: weights, configuration, tokenizer, data, settings, or
            versions.
    """
    was, is_now = _told(before or {}), _told(now)
    for what in dict.fromkeys((*is_now, *was)):
        if was.get(what) != is_now.get(what):
            raise InfoFlowError(
                f"{what} have changed since {str(where)!r} was written "
                f"({brief(was.get(what))} -> {brief(is_now.get(what))}): expected the same, to go "
                "on; choose another folder"
            )


def _told(record: Mapping[str, Any]) -> dict[str, Any]:
    """What numbers depend on, by what errors call it."""
    config, versions = record.get("config"), record.get("versions")
    config = config if isinstance(config, dict) else {}
    versions = versions if isinstance(versions, dict) else {}
    told = {
        "the model's weights": record.get("model_fingerprint"),
        "the model's configuration and code": record.get("configuration_fingerprint"),
        "the tokenizer's words and rules": config.get("tokenizer"),
        "the data": config.get("inputs"),
    }
    others = {name: value for name, value in config.items() if name not in ("tokenizer", "inputs")}
    told |= {f"settings ({name})": value for name, value in others.items()}
    return told | {
        f"versions ({name})": version
        for name, version in versions.items()
        if name not in _OF_NO_NUMBER
    }


def write_tables(out: Path, result: "ProbingResult") -> None:
    """A csv for every result."""
    import pandas as pd

    tables = {name: part.table(result.found[name]) for name, part in result.parts.items()}
    tables["capabilities"] = result.capabilities.to_frame()
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
    if result.curve is not None:
        tables["coverage_curve"] = result.curve.to_frame()
    for name, table in tables.items():
        write_text(out / f"{name}.csv", table.to_csv(index=False))
