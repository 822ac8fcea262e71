"""Every task has a card that says what its data are, and code in it that runs."""

import re

import pytest
from huggingface_hub import DatasetCard

from infoflow_lens import load_task
from infoflow_lens.tasks import dataset_card, list_tasks


@pytest.mark.parametrize("name", list_tasks())
def test_a_card_describes_the_task_and_how_to_make_it(name, tmp_path):
    task = load_task(name, seed=3)
    card = dataset_card(task)
    card.save(tmp_path / "README.md")
    read = DatasetCard.load(tmp_path / "README.md")
    assert read.data.pretty_name == f"infoflow-lens: {name}"
    assert task.source in read.text
    for parameter, value in task.parameters().items():
        assert f"| {parameter} | {value!r} |" in read.text
    (script,) = re.findall(r"```python\n(.*?)```", read.text, flags=re.S)
    made = {}
    exec(script.replace("10_000", "3"), made)
    assert made["task"] == task
    assert len(made["train"]) == 3


def test_a_card_of_tokens_shows_examples():
    assert re.search(r"\n    \w+ -> \d+  \w+ -> \d+", dataset_card(load_task("in_context_qa")).text)
