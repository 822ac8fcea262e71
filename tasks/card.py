"""Dataset cards: what somebody must know who finds a task's data on disk."""

import inspect

from huggingface_hub import DatasetCard, DatasetCardData

from infoflow_lens.tasks.registry import resolve_task
from infoflow_lens.tasks.task import SHARES, Target, Task, VectorTask
from infoflow_lens.tasks.tokens import TokenTask

_TEMPLATE = """---
{header}
---

# {name}

{description}

Source: {source}.

## Columns

{columns}

## Splits

{splits}

## Parameters

| parameter | value |
|---|---|
{parameters}

## Comparisons

{comparison}
{examples}
## To make it again

```python
from infoflow_lens import load_task

task = load_task({call})
train = task.dataset("train", 10_000).with_format("torch")
endless = task.dataset("train", None).with_format("torch")
```
"""


def summary(task: Task | type[Task]) -> str:
    """Return the first paragraphs of a task's docstring: what it is, before its attributes."""
    return inspect.cleandoc(task.__doc__ or "").split("\n\nAttributes:")[0].split("\n\nRaises:")[0]


def dataset_card(task: Task | str) -> DatasetCard:
    """Return the card of a task's datasets, in the Hugging Face Hub's format.

    ``dataset_card(task).save(path)`` writes it beside a saved dataset as ``README.md``.

    Args:
        task: a task, or its name.

    Raises:
        InfoFlowError: for an unknown name, or what is no task.
    """
    found: Task = resolve_task(task, Task)
    header = DatasetCardData(
        pretty_name=f"infoflow-lens: {found.name}",
        license="mit",
        tags=["synthetic", "interpretability", "infoflow-lens"],
        task_categories=["text-classification"] if isinstance(found, TokenTask) else ["other"],
    )
    parameters = found.parameters()
    return DatasetCard(
        _TEMPLATE.format(
            header=header.to_yaml(),
            name=found.name,
            description=summary(found),
            source=found.source,
            columns=_columns(found),
            splits=_splits(found),
            parameters="\n".join(f"| {key} | {value!r} |" for key, value in parameters.items()),
            comparison=_comparison(found),
            examples=_examples(found),
            call=_call(found),
        ),
        ignore_metadata_errors=False,
    )


def _call(task: Task) -> str:
    """Return the arguments of load_task; a function of the user's has no name to give."""
    if isinstance(task, Target):
        return "'module:name'"
    default = type(task)().parameters()
    changed = [
        f"{key}={'...' if callable(value) else repr(value)}"
        for key, value in task.parameters().items()
        if value != default[key]
    ]
    return ", ".join([repr(task.name), *changed])


def _columns(task: Task) -> str:
    if isinstance(task, TokenTask):
        return (
            f"- `x`: {task.n_tokens} token ids below {task.d_vocab}, named by the feature's "
            "`ClassLabel`; the last one is the response sign\n"
            f"- `y`: the label, one of {task.n_labels}, named likewise"
        )
    assert isinstance(task, VectorTask)
    return (
        f"- `x`: float32 [{task.n_tokens}, {task.d_token}], i.i.d. {task.tokens} tokens\n"
        f"- `y`: float32 [{task.d_output}], the target"
    )


def _splits(task: Task) -> str:
    if not isinstance(task, TokenTask):
        return "Train, validation and test are drawn from seeds of their own."
    if task.splits_by_sequence:
        shares = ", ".join(f"{split} {share:.0%}" for split, share in SHARES.items())
        return (
            f"No two splits share a sequence: each of the {task.space_size} sequences belongs to "
            f"one ({shares})."
        )
    held_out = getattr(task, "holdout", None)
    if held_out is None:
        return "All splits draw from the same stored sequences: memory is what is measured."
    return f"No two splits share {held_out}."


def _comparison(task: Task) -> str:
    profile = task.comparison
    if profile is None:
        return "The target compares nothing, or its number of comparisons is not known."
    return f"Dimension {profile.dimension}, order {profile.order} (InfoFlow 2026, Sec. 5.3)."


def _examples(task: Task) -> str:
    if not isinstance(task, TokenTask):
        return ""
    x, _ = task.sample(3, seed=0)
    return "\n## Examples\n\n" + "\n".join(f"    {line}" for line in task.render(x, True)) + "\n"
