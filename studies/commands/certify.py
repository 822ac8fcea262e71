"""``infoflow-lens certify``: whether one attention layer can fit labelled sequences, with proof."""

from pathlib import Path
from typing import Annotated, Any

import typer

from infoflow_lens.commands.common import (
    AsJson,
    Overwrite,
    Quiet,
    console,
    report_errors,
    say_json,
)

_SIGN = "<read>"


def certify(
    data: Annotated[
        str,
        typer.Argument(
            help="A file (csv, json, jsonl, parquet) or a saved dataset with a column of sequences "
            "(lists, or words with spaces) and one of labels; in a csv file every other column may "
            "be a position; or a task over token ids, such as in_context_qa, file.py:name or "
            "task:module:name."
        ),
    ],
    column: Annotated[str, typer.Option(help="Column of sequences.")] = "x",
    label: Annotated[str, typer.Option(help="Column of labels.")] = "y",
    n: Annotated[
        int | None,
        typer.Option("--n", help="Most sequences that are taken; default, 2000 of a large task."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the certificate to this json file.")
    ] = None,
    overwrite: Overwrite = False,
    seed: Annotated[int, typer.Option(help="Seed of a task's sequences.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Decide whether one attention layer can fit all labels, and check the proof again."""
    with report_errors():
        from infoflow_lens.foundation.documents import CERTIFICATE
        from infoflow_lens.foundation.errors import InfoFlowError
        from infoflow_lens.foundation.files import add_digest
        from infoflow_lens.studies.certificates.documents import certificate_document
        from infoflow_lens.studies.certificates.proof import verify

        if n is not None and n < 1:
            raise InfoFlowError(f"--n is {n}: expected at least 1")
        if out is not None:
            CERTIFICATE.check(out, overwrite=overwrite)
        sequences, labels, notes = _read(data, column, label, n, seed)
        document, certificate = certificate_document(sequences, labels, progress=not quiet)
        document["source"] = data
        document["notes"] = notes
        # the certificate is not given out before its proof has been checked by other code
        wrong = verify(document)
        if wrong:
            raise RuntimeError(f"internal error: the certificate fails its check ({wrong[0]})")
        if out is not None:
            CERTIFICATE.write(out, add_digest(document), overwrite=overwrite)
    if as_json:
        say_json(document)
        return
    screen = console()
    for line in (*notes, *certificate.describe().splitlines()):
        screen.print(line, markup=False, soft_wrap=True)
    screen.print(
        "Checked again, in plain integers, by verify() of infoflow_lens.studies.certificates.proof."
    )
    if out is not None:
        screen.print(f"certificate: {out}", markup=False, soft_wrap=True)
        screen.print(
            f"anybody can check it: python -m infoflow_lens.studies.certificates.proof {out}",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def _read(
    data: str, column: str, label: str, n: int | None, seed: int
) -> tuple[list[list[Any]], list[Any], list[str]]:
    """Return sequences of tokens, their labels, and what was done to them."""
    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.probing.data import find_data, read_rows

    named = find_data(data)
    is_task = named.kind == "task"
    of_files = {"--column": column != "x", "--label": label != "y"}
    of_others = of_files if is_task else {"--seed": seed != 0}
    if needless := [option for option, given in of_others.items() if given]:
        what = "a task, which has no columns" if is_task else "no task, so that nothing is drawn"
        raise InfoFlowError(
            f"{data!r} is {what}: expected no {' and no '.join(needless)}; leave it out"
        )
    if is_task:
        return _read_task(named.name, n, seed)
    table = read_rows(data)
    names = list(table.column_names)
    if label not in names:
        raise InfoFlowError(
            f"{data!r} has columns {names}, without {label!r}: name that of the labels by --label"
        )
    notes = []
    if n is not None and n < len(table):
        notes.append(f"The first {n} of {len(table)} rows.")
        table = table.select(range(n))
    labels = list(table[label])
    if column in names:
        sequences = [_tokens(row, data) for row in table[column]]
    # without a column of sequences, the columns are the positions
    else:
        positions = [name for name in names if name != label]
        if len(positions) < 2:
            raise InfoFlowError(
                f"{data!r} has columns {names}, without {column!r}: name that of the sequences by "
                "--column, or give a column for each position"
            )
        sequences = [list(row) for row in zip(*(table[name] for name in positions), strict=True)]
    # an empty field of a csv file would be a class or a token of its own
    gaps = (None, "") if named.path.suffix == ".csv" else (None,)
    rows = zip(sequences, labels, strict=True)
    missing = [i for i, (row, own) in enumerate(rows) if any(v in gaps for v in (*row, own))]
    if missing:
        raise InfoFlowError(f"row {missing[0]} of {data!r} has a missing value: remove such rows")
    lengths = sorted({len(row) for row in sequences})
    if len(lengths) > 1:
        raise InfoFlowError(
            f"the sequences of {data!r} have lengths {', '.join(map(str, lengths[:5]))}: expected "
            "one length; cut or pad them"
        )
    # the model is read at one place, which must not tell sequences apart
    if len({row[-1] for row in sequences}) > 1:
        sequences = [[*row, _SIGN] for row in sequences]
        notes.append(
            f"The sequences end in several tokens, so {_SIGN!r} was put behind each: the model is "
            "read there."
        )
    return sequences, labels, notes


def _tokens(row: Any, data: str) -> list[Any]:
    from infoflow_lens.foundation.errors import InfoFlowError

    if isinstance(row, str):
        return row.split()
    if isinstance(row, (list, tuple)):
        return list(row)
    raise InfoFlowError(
        f"{data!r} has the sequence {row!r}: expected a list of tokens, or words with spaces"
    )


def _read_task(name: str, n: int | None, seed: int) -> tuple[list[list[Any]], list[Any], list[str]]:
    from infoflow_lens.foundation.errors import InfoFlowError
    from infoflow_lens.studies.certificates.separability import MAX_SEQUENCES
    from infoflow_lens.tasks import TokenTask, load_task

    task = load_task(name)
    if not isinstance(task, TokenTask):
        raise InfoFlowError(
            f"task {name!r} has vector tokens: a certificate is for labelled sequences of token "
            "ids; estimate asks about vector tasks"
        )
    most = n or 2000
    if most > MAX_SEQUENCES:
        raise InfoFlowError(f"--n is {n}: expected at most {MAX_SEQUENCES} sequences of a task")
    if n is None and task.space_size <= MAX_SEQUENCES:
        x, y = task.all_sequences()
        notes = [f"All {len(x)} sequences of the task."]
    else:
        x, y = task.sample(most, seed)
        notes = [f"{most} of the task's {task.space_size} sequences, drawn at random."]
    tokens, labels = task.token_names, task.label_names
    sequences = [[tokens[token] for token in row] for row in x.tolist()]
    return sequences, [labels[index] for index in y.tolist()], notes
