"""The words of reports: what each means in a sentence. docs/glossary.md says more."""

from markupsafe import Markup

TERMS = {
    "information set": "the input positions that a state can still hold",
    "max-position rule": "each head passes on the token of its largest score",
    "top-k rule": "each head passes on the tokens of its k largest scores",
    "mechanisms rule": "each head passes on what describes it",
    "own token": "the token at the state's own position; the residual stream keeps it",
    "influence": "how much a state moves when an input token does",
    "influence inside": "share of the influence of other tokens that lies in the predicted set",
    "AUROC": "does influence rank predicted tokens above the others? .5 is chance",
    "label": "which ideal pattern describes a head: fixed, the largest key, several keys",
    "worth": "what the output loses when a head writes its mean alone",
    "recovery": "can a linear map read the attended token off the state?",
    "control": "the same map for a token that the head does not attend to",
    "entropy": "how spread the attention rows are, in nats",
    "layer": "layers count from 0, the first block",
}


def term(name: str, words: str | None = None) -> Markup:
    """Return a word with its meaning on hover and focus."""
    return Markup('<span class="term" tabindex="0">{}<span role="tooltip">{}</span></span>').format(
        words or name, TERMS[name]
    )
