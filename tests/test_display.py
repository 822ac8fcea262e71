"""Everything shows itself briefly, whatever it holds, and strings of others stay strings."""

import ast
import dataclasses
import importlib
import inspect
import io
import pkgutil
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pandas as pd
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.text import Text

import infoflow_lens as il
from infoflow_lens.agreement import CoverageCurve
from infoflow_lens.foundation import display
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks import (
    Intervention,
    LayerCapabilities,
    ModelCapabilities,
    Result,
    edit_head,
)
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.result import LabelledArray
from infoflow_lens.models.loading import LoadedModel
from infoflow_lens.report.phase import phase_figure
from infoflow_lens.tasks import list_tasks, load_task
from infoflow_lens.theory.information_sets import InformationSets
from tests.conftest import make_token_model, some_of

importlib.import_module("infoflow_lens.flows.ask")
for module in pkgutil.walk_packages(il.hooks.__path__, "infoflow_lens.hooks."):
    importlib.import_module(module.name)  # every class of results registers itself

KINDS = {
    name: kind
    for name, kind in Result.kinds.items()
    if issubclass(kind, Result)
    and "infoflow_lens" in kind.__module__
    and not inspect.isabstract(kind)
}
HOSTILE = "<script>alert('1')</script>" + "x" * 300


def made(hint: Any, axis: int) -> Any:
    """A value of a type; tensors have `axis` entries along every axis, and take no memory."""
    if hasattr(hint, "dims") and hasattr(hint, "array_type"):
        shape = (axis,) * len(hint.dims)
        dtype = torch.float32 if "float" in str(hint.dtypes) else torch.int64
        dtype = torch.bool if str(hint.dtypes).count("bool") else dtype
        return torch.zeros((), dtype=dtype).expand(shape)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return made(arguments[0], axis)
    if origin is tuple:
        many = len(arguments) == 2 and arguments[1] is Ellipsis
        return tuple(made(part, axis) for part in (arguments[:1] * 12 if many else arguments))
    if hint is RunRecord:
        return RunRecord(config={"probe": HOSTILE})
    values = {str: HOSTILE, int: 7, float: 0.5, bool: True}
    return values.get(hint)


def result_of(kind: type[Result], axis: int) -> Result:
    hints = get_type_hints(kind, include_extras=True)
    values = {item.name: made(hints[item.name], axis) for item in dataclasses.fields(kind)}
    return kind(**values)


@pytest.mark.parametrize("name", KINDS)
def test_a_big_result_shows_itself_without_being_read(name, monkeypatch):
    kind = KINDS[name]
    if not kind.small:
        # 10^12 entries or more: a frame of them, or a look at each, would never come back
        monkeypatch.setattr(kind, "to_frame", None)
    result = result_of(kind, 12 if kind.small else 3000)
    assert len(repr(result)) < 500
    shown = result._repr_html_()
    assert len(shown) < 20_000
    assert name in shown
    for text in (shown, result._repr_html_()):
        assert "<script" not in text
        assert "alert(&#x27;1&#x27;)" in text


def hostile_objects() -> dict[str, Any]:
    members = torch.zeros((), dtype=torch.bool).expand(12, 2000, 300, 300)
    layer = LayerCapabilities(12, 12, HOSTILE, HOSTILE, "scores", False, (HOSTILE,), ())
    sizes = dict.fromkeys(il.agreement.SetAgreement.__dataclass_fields__, 0.5)
    one = il.agreement.SetAgreement(**sizes)
    return {
        "InformationSets": il.theory.InformationSets(members),
        "Agreement": il.agreement.Agreement(0.1, (one,) * 96, (one,) * 96, one),
        "CoverageCurve": CoverageCurve(((0.5,) * 96,) * 64, *((0.5,) * 64,) * 3),
        "ModelCapabilities": ModelCapabilities(
            HOSTILE, (layer,) * 96, False, True, HOSTILE, HOSTILE, False, False, {"x": HOSTILE}
        ),
        "LoadedModel": LoadedModel(torch.nn.Linear(2, 2), None, "memory", HOSTILE * 9),
        **{f"task {name}": load_task(name) for name in list_tasks()},
    }


OBJECTS = hostile_objects()


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_show_themselves_briefly(name):
    assert len(repr(OBJECTS[name])) < 500
    shown = OBJECTS[name]._repr_html_()
    assert len(shown) < 20_000
    assert "<script" not in shown


def test_a_flow_escapes_its_tokens(tmp_path):
    pytest.importorskip("infoflow_lens.report.pages")
    from tests.conftest import make_token_model

    found = il.flow(make_token_model(), [[1, 2, 3]], progress=False)
    hostile = dataclasses.replace(found, tokens=((HOSTILE, "</script>", "&amp;"),), title=HOSTILE)
    assert len(repr(hostile)) < 500
    assert "<script>alert" not in hostile._repr_html_()
    page = hostile.to_html(tmp_path / "flow.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page


def test_a_value_in_a_few_words():
    assert display.brief(torch.zeros(3, 4)) == "float32 [3, 4]"
    assert display.brief((torch.zeros(3), torch.zeros(3))) == "2 of float32 [3]"
    assert display.brief(tuple(range(100))) == "100 of int"
    assert display.brief({"a": 1, "b": 2}) == "2 of a, b"
    assert display.brief("x" * 999) == repr("x" * 79 + "…")
    assert display.brief(0.123456) == "0.1235"
    assert display.brief(torch.nn.Linear(2, 2)) == "Linear"


def test_a_table_shows_the_first_rows_and_says_how_many_are_left():
    frame = pd.DataFrame({"<b>": ["<i>"] * 50, "share": [0.5] + [float("nan")] * 49})
    shown = display.table(frame)
    assert shown.count("<tr>") == 13
    assert "&lt;b&gt;" in shown
    assert "<i>" not in shown
    assert "38 more rows" in shown
    assert "\N{EN DASH}" in shown


# matplotlib reads mathematics between dollars

X = torch.randint(4, 17, (12, 7), generator=torch.Generator().manual_seed(4))


def why_of(text):
    return il.hooks.Why(
        pieces=torch.eye(2, dtype=torch.float64), query_parts=(text, "b"), key_parts=("a", text),
        margin=2.0, layer=0, head=0, query=1, keys=(0, 1), tokens=(text, text, "c"),
        record=RunRecord(),
    ).plot()  # fmt: skip


def array_of(text, *shape):
    dims = (text, "other", text + " again")[: len(shape)]
    coords = {
        dim: tuple(f"{text}{i}" for i in range(n)) for dim, n in zip(dims, shape, strict=True)
    }
    return LabelledArray(text, torch.rand(shape), dims, coords).plot(text)


def sufficiency_of(text):
    model = make_token_model()
    mechanisms = il.hooks.measure_mechanisms(model, X[:6], progress=False)
    others = {text: {(0, 0): "global"}}
    return il.hooks.measure_sufficiency(
        model, X[6:], mechanisms, draws=1, others=others, progress=False
    ).plot()


def edge_budget_of(text):
    found = il.hooks.measure_edge_budget(
        make_token_model(), X[6:], X[:6], budgets=(3, 5), methods=("product",), progress=False
    )
    return dataclasses.replace(found, methods=(text,)).plot()


def rankings_of(text):
    sets = InformationSets(torch.ones(1, 3, 8, 8, dtype=torch.bool).tril(-2))
    scores = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return il.ranking.compare_rankings({text: sets}, {text + "s": scores}, scores + 0.1).plot()


def flow_of(text):
    found = il.flow(make_token_model(), X[:1], progress=False)
    return dataclasses.replace(found, tokens=((text,) * X.shape[1],)).plot()


def phases_of(text):
    return phase_figure([{"heads": (1,), "n_tokens": 3, "verdict": "excluded, proved"}], text)


def intervention_of(text):
    class Own(Intervention):
        def edits(self, plain):
            yield edit_head(plain, 0, 0, torch.zeros_like, text)

    return il.run_probes(make_token_model(), X, [Own()], progress=False)[0].plot()


FIGURES = {  # by the file that draws
    "hooks/interventions/probe.py": intervention_of,
    "hooks/why.py": why_of,
    "hooks/result.py": lambda text: array_of(text, 2, 3),
    "hooks/result.py, bars": lambda text: array_of(text, 3),
    "hooks/result.py, panels": lambda text: array_of(text, 2, 2, 3),
    "hooks/mechanisms/measure.py": sufficiency_of,
    "hooks/mechanisms/budgets.py": edge_budget_of,
    "infoflow_lens/ranking.py": rankings_of,
    "infoflow_lens/report/flow_plot.py": flow_of,
    "infoflow_lens/report/phase.py": phases_of,
}
FIXED = {
    "hooks/interventions/heads.py",
    "infoflow_lens/probing/parts.py",
}  # all words ours


def test_every_file_that_draws_is_asked():
    root = Path(il.__file__).parents[1]
    drawing = {
        str(path.relative_to(root))
        for house in ("hooks", "infoflow_lens")
        for path in (root / house).rglob("*.py")
        if "Figure(figsize" in path.read_text() or "StillPicture(figsize" in path.read_text()
    }
    assert drawing <= set(FIGURES) | FIXED


TEXTS = ("$$", r"$\frac", r"\$5 and $6")
DOLLARS = [(name, text) for name in FIGURES for text in TEXTS]
WHY = "hooks/why.py"  # which draws fast


@pytest.mark.parametrize(
    ("name", "text"),
    some_of(DOLLARS, *[(n, t) for n, t in DOLLARS if n == WHY], *DOLLARS[:1]),
)
def test_dollars_are_no_mathematics(name, text):
    """`$$` was an error of matplotlib, and a title with two dollars unreadable."""
    figure = FIGURES[name](text)
    figure.savefig(io.BytesIO(), format="png", dpi=20)
    drawn = [each._preprocess_math(each.get_text()) for each in figure.findobj(Text)]
    shown = [words for words, is_mathematics in drawn if is_mathematics is False]
    mathematics = {words for words, is_mathematics in drawn if is_mathematics}
    assert any(text in words or repr(text)[1:-1] in words for words in shown)
    assert not any("frac" in words or "5 and" in words or "$$" in words for words in mathematics)


WORDS = ("کتاب\u200cها", "क्\u200dष", "👩\u200d💻", "\u200cخواهم", "a\u200d\tb")  # noqa: RUF001


@pytest.mark.parametrize("word", WORDS)
def test_joiners_inside_of_words_stay(word):
    """Persian, Hindi and emoji were full of \\u200c and \\u200d."""
    decoding = types.SimpleNamespace(decode=lambda ids: word)
    model = types.SimpleNamespace(tokenizer=decoding)
    ((read,),) = readable_tokens(model, [torch.tensor([0])])
    assert read == word.replace("\t", r"\t")
    assert word.replace("\t", r"\t") in display.brief(word)
    found = il.hooks.Why(
        pieces=torch.eye(2, dtype=torch.float64), query_parts=("a", "b"), key_parts=("a", "b"),
        margin=2.0, layer=0, head=0, query=1, keys=(0, 1), tokens=(word, word, "c"),
        record=RunRecord(),
    )  # fmt: skip
    assert word.replace("\t", r"\t") in found.summary()


@example(text=" \u200c ")
@given(text=st.text(st.sampled_from("ab\\u20cd'\"\n \u200c\u200d\u200e"), max_size=8))
def test_what_is_quoted_can_be_read_back(text):
    quoted = display.quote(text)
    assert ast.literal_eval(quoted) == text
    assert quoted == repr(text) or text.strip("\u200c\u200d \n")
    assert "\u200e" not in quoted  # which turns the direction
