"""An intervention of your own: an edit of a pass, and what the output loses by it, head by head."""

from infoflow_lens import hooks, load_any


class LooksAtFirst(hooks.Intervention):
    """Each head in turn looks at the first token alone."""

    def edits(self, plain):
        for layer, head in hooks.heads_of(plain):
            yield hooks.edit_head(plain, layer, head, to_first)


def to_first(pattern):  # [batch, query, key], of one head
    first = pattern * 0
    first[..., 0] = pattern.sum(dim=-1)
    return first


if __name__ == "__main__":
    model, texts = load_any("stdlib-2l").model, ["def f(name):", "import os\nfor name in names:"]
    (found,) = hooks.run_probes(model, texts, [LooksAtFirst()], progress=False)
    print(found.to_frame().sort_values("damage", ascending=False).head())
