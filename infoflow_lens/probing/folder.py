"""The folder of a run: whose results it holds, and what is in it."""

import json
from dataclasses import asdict
from pathlib import Path

from infoflow_lens.agreement import compare_by_position
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import write_json, write_text
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.result import ProbingResult


def check_folder(out: Path, config: ProbingConfig) -> None:
    """Refuse a folder with results of other settings.

    Raises:
        InfoFlowError: naming the settings that differ.
    """
    path = out / "record.json"
    if not path.is_file():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (json.JSONDecodeError, KeyError) as error:
        raise InfoFlowError(f"{str(path)!r} is no record of a run ({error})") from error
    now = json.loads(json.dumps(asdict(config)))
    differing = [name for name in now if before.get(name) != now[name]]
    if differing:
        changes = ", ".join(f"{name} {before.get(name)!r} -> {now[name]!r}" for name in differing)
        raise InfoFlowError(
            f"{str(out)!r} holds results of other settings ({changes}): expected the same, to go "
            "on, or another folder"
        )


def claim_folder(out: Path, record: RunRecord) -> None:
    """Write the record, or refuse if the model or the data have changed since.

    Raises:
        InfoFlowError: naming what changed.
    """
    path = out / "record.json"
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        for what, was, now in (
            ("the model's weights", before["model_fingerprint"], record.model_fingerprint),
            ("the data", before["config"]["inputs"], record.config["inputs"]),
        ):
            if was != now:
                raise InfoFlowError(
                    f"{what} have changed since {str(out)!r} was written ({was} -> {now}): "
                    "expected the same, to go on; choose another folder"
                )
    write_json(path, record.to_dict())


def write_tables(out: Path, result: ProbingResult) -> None:
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
