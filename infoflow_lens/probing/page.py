"""The page of a run."""

from infoflow_lens.agreement import Agreement
from infoflow_lens.hooks import InfluenceResult
from infoflow_lens.probing.result import ProbingResult
from infoflow_lens.report.probing import ProbingReport, Section, ShownSequence

_RULES = {
    "argmax": "if every head passes the token of its largest score",
    "mechanisms": "with every head passing on what its mechanism does",
}


def report_of(result: ProbingResult) -> ProbingReport:
    """What the page shows of it."""
    config, found = result.config, result.capabilities
    facts = [("layers", str(len(found.layers))), ("weights", f"{found.dtype} on {found.device}")]
    for name, part in result.parts.items():
        facts += part.facts(result.found[name])
    headline = f"{found.kind}, probed on {config.data}."
    rule = "mechanisms" if "mechanisms" in result.agreement else "argmax"
    shown: list[ShownSequence] = []
    if result.influence is not None:
        headline += _headline(result.agreement[rule], result.influence)
        shown = _shown(result, rule)
    return ProbingReport(
        title=f"What the states of {config.model} can depend on, and do",
        headline=headline,
        facts=facts,
        problems=found.problems(),
        capabilities=found.to_frame().to_html(index=False, border=0),
        sections=[
            Section(part.title or name, part.text, part.figures(result.found[name]))
            for name, part in result.parts.items()
        ],
        agreement=result.agreement,
        rule=_RULES[rule],
        curve=result.curve,
        shown=shown,
        record=result.record,
    )


def _headline(agreement: Agreement, influence: InfluenceResult) -> str:
    last, others = agreement.cls, float((influence.lengths.double() - 1).mean())
    text = (
        f" {last.influence_inside:.0%} of the influence of other tokens on the last state lies "
        f"inside the set that theory allows it ({last.predicted_size:.1f} of {others:.1f})."
    )
    if last.predicted_size > 0.95 * others:
        text += " That set holds nearly every token, so the prediction excludes nothing."
    return text


def _shown(result: ProbingResult, rule: str) -> list[ShownSequence]:
    """The first sequences, with what their last states depend on."""
    assert result.influence is not None
    members, full = result.predicted[rule].members[-1], result.influence.full()
    shown = []
    for index, texts in enumerate(result.texts[: len(result.influence.lengths)]):
        n = len(texts)
        last = n - 1 + members.shape[1] - members.shape[2]
        shown.append(ShownSequence(texts, full[-1, index, last, :n], members[index, last, :n]))
    return shown
