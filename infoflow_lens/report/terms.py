"""The words of reports: what each means in a sentence, and where the glossary explains it."""

from markupsafe import Markup

GLOSSARY = "https://github.com/infoflow-lens/infoflow-lens/blob/main/docs/glossary.md"

TERMS = {
    "information set": ("information-set", "the input positions that a state can still hold"),
    "max-position rule": (
        "max-position-rule",
        "each head passes on the token of its largest score",
    ),
    "top-k rule": ("top-k-rule", "each head passes on the tokens of its k largest scores"),
    "mechanisms rule": ("mechanisms-rule", "each head passes on what its mechanism does"),
    "own token": (
        "own-token",
        "the token at the state's own position; the residual stream keeps it",
    ),
    "influence": ("influence", "how much a state moves when an input token does"),
    "influence inside": (
        "influence-inside",
        "share of the influence of other tokens that lies in the predicted set",
    ),
    "AUROC": ("auroc", "does influence rank predicted tokens above the others? .5 is chance"),
    "mechanism": ("mechanism", "the cheapest ideal pattern that may replace a head's own"),
    "damage": ("damage", "what the output loses when a head's pattern is replaced"),
    "recovery": ("recovery", "can a linear map read the attended token off the state?"),
    "control": ("control", "the same map for a token that the head does not attend to"),
    "entropy": ("entropy", "how spread the attention rows are, in nats"),
    "layer": ("layer", "layers count from 0, the first block"),
}


def term(name: str, shown: str | None = None) -> Markup:
    """A word with its meaning on hover and focus, and a link to the glossary."""
    anchor, meaning = TERMS[name]
    return Markup(
        '<a class="term" href="{}#{}" rel="noreferrer" target="_blank">{}'
        '<span role="tooltip">{}</span></a>'
    ).format(GLOSSARY, anchor, shown or name, meaning)
