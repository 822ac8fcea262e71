"""Commands on a text: `ask` and `serve`, why this answer; `flow` and `why`, what heads move."""

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from infoflow_lens.commands.common import (
    AsJson,
    Backend,
    Device,
    DrawingSeed,
    Dtype,
    Overwrite,
    Quiet,
    SecondText,
    Text,
    console,
    options_of,
    pair_of,
    print_lines,
    read_integers,
    report_errors,
    say,
    say_json,
)
from infoflow_lens.foundation.display import begin_sentence, brief, quote_readable
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Repeated, settings
from infoflow_lens.probing.config import InfluenceKind, Model

_GUESSES = 3  # of a word, the likeliest
_MOST_WORDS = 20  # those that change most
_STRIP = 7  # characters of a column


@dataclass(frozen=True)
class Question:
    """What `ask` and `serve` ask, with the names of the function's arguments."""

    model: Model
    text: Text
    answer: Annotated[str | None, "The answer, such as ' Mary'; default, what the model says."] = (
        None
    )
    against: Annotated[str | None, "Another answer; default, the second most probable."] = None
    instead: Annotated[
        str | None, "The other text, of as many tokens; default, one that is chosen."
    ] = None
    at: Annotated[
        int | None,
        "Ask why the token at this position of the text stands there; what follows is not read.",
    ] = None
    quick: Annotated[bool, "No tokens, no strips, ten heads, no pruning: 20 to 80 passes."] = False
    exact: Annotated[bool, "Measure all heads."] = False
    seed: DrawingSeed = 0
    second: SecondText = None
    instead_second: Annotated[
        str | None, "The second text of the other pair; default, that of the first pair."
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the function, in which pairs of texts are one.

        Raises:
            InfoFlowError: for half of a second pair.
        """
        asked = dict(vars(self))
        second, other = asked.pop("second"), asked.pop("instead_second")
        if other is not None and (second is None or self.instead is None):
            # in words that the help of the options has, and the form of a served page
            raise InfoFlowError(
                f"the second text of the other pair is {brief(other)}, and a pair is missing: "
                "expected a second text of the text, and the other text, too; or leave it out"
            )
        asked["text"] = pair_of(self.text, second)
        if self.instead is not None:
            asked["instead"] = pair_of(self.instead, second if other is None else other)
        return asked


@options_of(Question, arguments=("model", "text"))
def ask(
    config: Callable[[], Question],
    out: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    overwrite: Overwrite = False,
    units: Annotated[
        str | None, typer.Option(help="words or sentences: tokens of each are replaced at once.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="A folder that keeps what was measured; the same command goes on there."),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Find which tokens, states, heads and paths decide between two answers, and measure each."""
    with report_errors():
        from infoflow_lens.foundation.documents import ANSWER_PAGE

        # a page that may not be written is refused before minutes of measuring
        if out is not None:
            ANSWER_PAGE.check(out, overwrite=overwrite)
        # heavy libraries load only once the options are known to be right
        from infoflow_lens.flows.ask import ask as measure

        run: dict[str, Any] = {"device": device, "dtype": dtype, "progress": not quiet}
        found = measure(**config().arguments(), units=units, resume=resume, **run)
        try:
            if out is not None:
                found.to_html(out, overwrite=overwrite)
        finally:  # also where the page cannot be written, on a full disk
            _show(found, as_json=as_json)
    if out is not None:
        say(f"page: {out}", err=as_json)


def _show(found: Any, *, as_json: bool) -> None:
    if not as_json:
        _print_answer(found)
        return
    tables = {
        name: found.to_frame(name).to_dict("records")
        for name in ("tokens", "replacements", "states", "heads", "paths", "looks")
    }
    about = {"summary": found.summary(), "value": found.value, "other": found.other_value}
    say_json({**about, **tables})


def _print_answer(found: Any) -> None:
    out = console()

    def show(line: str) -> None:
        out.print(line, markup=False, soft_wrap=True)

    show(found.summary())
    if warning := found.warning():
        show(f"Warning: {warning}")
    show(found.describe_units())
    show(f"Other text: {quote_readable(''.join(found.other_tokens))}")
    print_lines(
        "What decides",
        [
            f"{sentence}: cut, {found.write(found.path_effect[group].sum())}"
            for sentence, group in found.bundles()
        ],
    )
    if found.strip_layers:
        out.print("[bold]Where: share of the difference in the state of a word, by layer[/bold]")
        for line in _strips(found):
            show(f"    {line}")
    print_lines("Words: change when each is replaced", _words(found))
    # heads that were not measured have no effect
    heads = found.to_frame("heads").dropna().head(10)
    pairs = zip(heads["name"], heads["effect"], strict=True)
    said = [f"{name} {found.write(effect)}" for name, effect in pairs]
    print_lines("Heads and MLPs: change with the other text's output", [", ".join(said)])
    if against := found.describe_opposition():
        show(f"    against {found.side}: {against}")
    print_lines(
        f"Where they look from {found.read_word}",
        [found.look(i) for i in range(len(found.looked))],
    )
    print_lines("How sure", found.describe_certainty())
    print_lines("Notes", found.notes)


def _strips(found: Any) -> list[str]:
    """Return a line for each word whose state comes to matter."""
    names = [found.name_span(number) for number in range(len(found.spans))]
    width = max(map(len, names)) + 1
    shares = found.shares
    lines = [" " * width + "".join(f"{layer:>{_STRIP}}" for layer in found.strip_layers)]
    for unit, word in enumerate(names):
        column = shares[:, unit]
        if float(column.abs().max()) >= 0.05:
            lines.append(f"{word:{width}}" + "".join(f"{v:{_STRIP}.2f}" for v in column.tolist()))
    return lines


def _words(found: Any) -> list[str]:
    sizes: dict[int, tuple[float, str]] = {}
    columns = [
        "effect",
        "error",
        "replacements",
        "effect of the other token",
        "other token",
    ]
    rows = found.to_frame("tokens")[columns].itertuples(index=False)
    for number, row in enumerate(rows):
        effect, error, n, other, instead = row
        mean = f"{found.write(effect)} ± {found.write(error, '')} by {n} words"
        said = [] if effect != effect else [mean]  # NaN
        said += [f"{found.write(other)} by {quote_readable(instead)}"] if other else []
        effects = found.replacement_effects[number].tolist()
        guesses = zip(found.replacements[number][:_GUESSES], effects)
        said += [
            f"{found.write(one)} by {quote_readable(guess)}"
            for guess, one in guesses
            if guess != instead
        ]
        if said:
            size = max(abs(change) for change in (effect, other) if change == change)
            sizes[number] = size, f"{found.name_span(number)}: {', '.join(said)}"
    # of a long text those that change most, in the order of the text
    most = sorted(sorted(sizes, key=lambda number: -sizes[number][0])[:_MOST_WORDS])
    lines = [sizes[number][1] for number in most]
    if len(sizes) > len(most):
        lines.append(f"{len(sizes) - len(most)} others change it less: see --out or --json")
    nearest = found.nearest_order()
    return [*lines, nearest] if nearest else lines


@options_of(Question, arguments=("model", "text"))
def serve(
    config: Callable[[], Question],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of this machine; default, a free one.")
    ] = 0,
    idle: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="End after so many minutes without a question."),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Answer as ask does, on a page with a form for other texts and answers, until Ctrl-C.

    Nobody but a browser on this machine that has the printed address can open the page.
    """
    with report_errors():
        from infoflow_lens.flows.ask import Answer, ask, cut_lines
        from infoflow_lens.flows.serve import AnswerServer, read_place
        from infoflow_lens.foundation.progress import hide_library_bars
        from infoflow_lens.hooks.readouts import says_next_token
        from infoflow_lens.models.loading import load_any
        from infoflow_lens.report.answer import Form

        question = config()

        def measure(form: Form) -> Answer:
            asked = replace(
                question, text=form.text, answer=form.answer or None, against=form.against or None,
                instead=form.instead or None, at=read_place(form.at), second=form.second or None,
                instead_second=form.instead_second or None,
            )  # fmt: skip
            return ask(**asked.arguments() | {"model": loaded}, progress=not quiet)

        def cut(found: Answer, lines: tuple[int, ...]) -> float:
            return cut_lines(loaded, found, lines)

        # the port is taken before the model loads, which takes longer
        with closing(AnswerServer(measure, port, cut)) as server:
            with hide_library_bars() if quiet else nullcontext():
                loaded = load_any(question.model, device=device, dtype=dtype, backend="opened")
            place = "" if question.at is None else str(question.at)
            words = (question.answer or "", question.against or "", question.instead or "")
            pair = (question.second or "", question.instead_second or "")
            first = Form(question.text, *words, place, *pair)
            seconds = None if idle is None else 60 * idle
            lost = server.run(
                first,
                lambda: say(f"open {server.address} (Ctrl-C ends it)"),
                seconds,
                says_next=says_next_token(loaded.model),
            )
            if lost:
                texts = ", ".join(brief(form.text) for form in lost)
                say(f"stopped: {len(lost)} not answered: {texts}", err=True)


@settings
class FlowOptions:
    """What `flow` draws, with the names of the function's arguments."""

    model: Model
    text: Annotated[
        tuple[str, ...], Repeated(), "The text that the model reads; several are shown one by one."
    ]
    position: Annotated[
        str,
        "Positions whose influence is measured, such as -1 or 4,7; all; auto: all where that takes "
        "seconds, else the last.",
    ] = "auto"
    influence: Annotated[
        Literal[InfluenceKind, "none"],
        "Exact Jacobians, an estimate of them, resample ablation or none; auto: exact where cheap.",
    ] = "auto"
    rule: Annotated[
        Literal["max_position", "top_k", "mechanisms"],
        "What a head passes on: the token of its largest score, those of its k largest, or what "
        "its label says.",
    ] = "max_position"
    k: Annotated[int, "Tokens that a head passes on by the rule top_k."] = 3
    without: Annotated[
        tuple[int, ...], "Key positions that no head passes on, such as 0 for BOS, -1 for EOS."
    ] = ()
    max_length: Annotated[int | None, "Cut texts to this many tokens."] = None
    seed: DrawingSeed = 0
    second: SecondText = None


@options_of(FlowOptions, arguments=("model", "text"))
def flow(
    config: Callable[[], FlowOptions],
    with_text: Annotated[
        str | None, typer.Option("--with", help="Another text, to stand beside the one given.")
    ] = None,
    with_model: Annotated[
        str | None, typer.Option(help="Another model, to stand beside the one given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("flow.html"),
    device: Device = "cpu",
    dtype: Dtype = None,
    backend: Backend = "auto",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Draw what can reach the states of a text, beside what does: one page, to click through."""
    with report_errors():
        from infoflow_lens.foundation.documents import FLOW_PAGE

        FLOW_PAGE.check(out, overwrite=overwrite)
        from infoflow_lens.flows.result import compare_flows
        from infoflow_lens.flows.run import flow as make

        asked: dict[str, Any] = dict(vars(config()))
        texts, position, second = list(asked["text"]), asked["position"], asked.pop("second")
        # a second text, a second model, or both stand beside the first
        is_comparison = with_text is not None or with_model is not None
        if is_comparison and len(texts) > 1:
            raise InfoFlowError(
                f"--with and --with-model stand beside one text: expected one, not {len(texts)}; "
                "put texts with spaces into quotes"
            )
        if second is not None and len(texts) > 1:
            raise InfoFlowError(
                f"--second is the second text of a pair: expected one text before it, not "
                f"{len(texts)}; put texts with spaces into quotes"
            )
        if position not in ("auto", "all"):
            asked |= {"position": read_integers(position.split(","), "--position")}
        if asked["influence"] == "none":
            asked |= {"influence": None}
        run = {"device": device, "dtype": dtype, "backend": backend, "progress": not quiet}
        inputs: list[dict[str, Any]] = [{"text": [pair_of(text, second) for text in texts]}]
        if is_comparison:
            beside = texts if with_text is None else [with_text]
            inputs.append({"text": [pair_of(text, second) for text in beside]})
            inputs[1] |= {} if with_model is None else {"model": with_model}
        flows = [make(**asked | one | run) for one in inputs]
        compared = compare_flows(flows[0], flows[1]) if is_comparison else None
        try:
            (compared or flows[0]).to_html(out, overwrite=overwrite)
        finally:  # also where the page cannot be written, on a full disk
            _say_found(flows, compared)
    say(f"page: {out}")


def _say_found(flows: Sequence[Any], compared: Any) -> None:
    names = ("",) if compared is None else tuple(f"{name}: " for name in compared.names)
    for name, found in zip(names, flows, strict=True):
        sources = map(found.describe_sources, range(len(found.tokens)))
        for sentence in (*sources, found.summary()):
            if sentence:
                say(f"{name}{sentence}" if name else f"{begin_sentence(sentence)}.")
    if compared is not None:
        say(compared.summary())
    # notes that both sides have are said once
    for note in dict.fromkeys(
        name + note for name, found in zip(names, flows, strict=True) for note in found.notes
    ):
        say(note, err=True)


@dataclass(frozen=True)
class WhyOptions:
    """What `why` asks, with the names of the function's arguments."""

    model: Model
    text: Text
    layer: Annotated[int, "Layer of the head, from 0, or from -1 backwards."]
    head: Annotated[int, "The head, from 0, or from -1 backwards."]
    query: Annotated[int, "Position of the query, from 0, or from -1 backwards."] = -1
    keys: Annotated[
        tuple[int, ...] | None, "Positions of the two keys, such as 4,2; default, the two best."
    ] = None
    second: SecondText = None


@options_of(WhyOptions, arguments=("model", "text"))
def why(
    config: Callable[[], WhyOptions],
    rows: Annotated[
        int, typer.Option(help="Number of parts that are shown, the strongest first.")
    ] = 8,
    device: Device = "cpu",
    dtype: Dtype = None,
    backend: Backend = "auto",
    as_json: AsJson = False,
) -> None:
    """Split the difference of two attention scores over what wrote the query's and keys' states."""
    with report_errors():
        from infoflow_lens.flows.why import why as ask
        from infoflow_lens.foundation.settings import Count, check

        check(rows, Count, "--rows")
        asked: dict[str, Any] = dict(vars(config()))
        asked["text"] = pair_of(asked["text"], asked.pop("second"))
        found = ask(**asked, device=device, dtype=dtype, backend=backend)
    if as_json:
        tables = {f"by_{by}": found.table(by).to_dict("records") for by in ("key", "query")}
        place = {name: getattr(found, name) for name in ("layer", "head", "query", "keys")}
        about = {**place, "tokens": found.tokens, "margin": found.margin}
        say_json({**about, **tables})
        return
    _print_why(found, rows)


def _write(value: float) -> str:
    """Write what a part adds; of a small margin no part of 0.000 has 332% of it."""
    return f"{value:+.1e}" if 0 < abs(value) < 5e-4 else f"{value:+.3f}"


def _print_why(found: Any, rows: int) -> None:
    from rich.table import Table

    out = console()
    out.print(found.summary(), markup=False, soft_wrap=True)
    for by, title in (("key", "why this key"), ("query", "what the head looks for")):
        table = Table(title=title, title_justify="left")
        table.add_column(f"part of the {'keys' if by == 'key' else 'query'}")
        table.add_column("adds", justify="right")
        table.add_column("share", justify="right")
        parts = found.table(by)
        for part, value, share in parts.head(rows).itertuples(index=False):
            table.add_row(part, _write(value), f"{share:.0%}")
        others = parts.iloc[rows:][["value", "share"]].sum()
        if len(parts) > rows:
            table.add_row(
                f"the other {len(parts) - rows}", _write(others.value), f"{others.share:.0%}"
            )
        out.print(table)
    print_lines("Notes", found.notes)
