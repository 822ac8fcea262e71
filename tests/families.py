"""The table of families: each type of transformers opened, against transformers alone.

    python -m tests.families --write       # all types, eager and sdpa: docs/families.md
    python -m tests.families --part 1      # a third of them
    python -m tests.families gpt2 bert     # these

Each row is a small random model, run without padding and with padding on either side. Beside it
runs a copy with eager attention, of which transformers itself gives patterns and states, and whose
modules are hooked by names that stand here. Compared are

- output: of the watched model with the bare one (bit by bit with eager attention);
- patterns, states, and resid_mid with what the module behind it reads;
- sums: that what enters a block, attention and MLP add up to what leaves it;
- visible keys, with the weights of the copy (none underflows here), and by brute force: a key's
  vector is changed where it enters the block, and z of every other query changes or does not;
- edits: that one of a pattern reaches the output, and gives what z of that head does at 0;
- shares: that parts of the last state, normed, add up to logit differences;
- derivatives: forward ones of the last state by the embedding.
"""

import argparse
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from infoflow_lens import InfoFlowError
from infoflow_lens.models.named import open_model
from tests.reference import families

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
N_POS, BAR = 7, 2e-5
NOT_OFFERED = "transformers has no such attention of it"
STACKS = {"funnel": "funnel.encoder"}
# modules, by their names in transformers, whose input is the state behind attention
_READS_MID = {
    "post_attention_layernorm": "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gpt_oss phi3 "
    "olmo starcoder2 stablelm granite persimmon smollm3 ernie4_5 nemotron qwen2_moe olmoe "
    "granitemoe helium arcee seed_oss bitnet bloom phimoe hunyuan_v1_dense glm glm4 deepseek_v2 "
    "deepseek_v3 eurobert qwen3_next diffllama",
    "pre_feedforward_layernorm": "gemma2 gemma3_text gemma4_text",
    "mlp": "olmo2 olmo3 exaone4 openai-gpt nomic_bert",
    "ln_2": "gpt2 gpt_neo gpt_bigcode",
    "norm_2": "mpt",
    "final_layer_norm": "opt xglm biogpt",
    "layernorm2": "ctrl",
    "intermediate": "bert roberta electra deberta deberta-v2 mpnet roformer camembert xlm-roberta "
    "bert-generation data2vec-text convbert big_bird ernie ibert layoutlm rembert nystromformer",
    "ffn": "albert distilbert funnel",
    "pre_ff_layernorm": "jamba bamba",
    "mlp_norm": "modernbert",
    "ffn_norm": "lfm2",
    "layer_norm2": "clip_text_model",
    "feedforward_layernorm": "apertus",
    "channel_pre_norm": "recurrent_gemma",
    "ff": "xlnet",
    "LayerNorm": "esm",
    "ln": "megatron-bert",
}
READS_MID = {kind: name for name, kinds in _READS_MID.items() for kind in kinds.split()}


@dataclass
class Row:
    """What was compared of a type: counts, what was wrong, and why something is not there."""

    kind: str
    how: str
    counts: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)
    refused: str = ""
    lacks: set = field(default_factory=set)
    notes: set = field(default_factory=set)

    def check(self, what, apart, bar=BAR):
        """Count a comparison; it is wrong where numbers are further apart."""
        self.counts[what] += 1
        if not apart < bar:
            self.wrong.append(f"{what}: {apart:.1e}")

    @property
    def verdict(self):
        return "refused" if self.refused else "WRONG" if self.wrong else "right"


def far(one, other):
    """How far tensors are apart, as a share of the largest number."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


class Comparison:
    """One type with one attention function, and the copy with eager attention beside it."""

    def __init__(self, kind, how):
        self.row = Row(kind, how)
        self.plain = families.build(kind)
        self.model = families.build(kind, how)
        self.model.load_state_dict(self.plain.state_dict())
        self.modules = dict(self.plain.named_modules())
        self.ids = families.tokens(N_POS)
        self.named = open_model(self.model, stack=STACKS.get(kind))
        self.blocks = self.named.anatomy.blocks
        self.attending = [i for i, block in enumerate(self.blocks) if block.attentions]
        self.row.lacks = {name.split(".", 2)[2] for name in self.named.lacks()}

    def run(self):
        for kwargs in families.masks(self.ids).values():
            self.real = kwargs.get("attention_mask", torch.ones_like(self.ids)).bool()
            self.kwargs = kwargs
            with torch.no_grad():
                self.bare = self.model(self.ids, **kwargs)[0]
                self.out, self.cache = self.named.run_with_cache(self.ids, **kwargs)
                self.compare_output()
                self.compare_with_transformers()
                self.compare_sums()
                self.compare_edits()
                self.compare_visible_keys()
                if "attention_mask" not in kwargs:
                    self.compare_shares()
        self.compare_derivatives()
        return self.row

    def of_block(self, layer, name):
        return self.cache[f"blocks.{layer}.{name}"]

    def compare_output(self):
        exact = self.model.config._attn_implementation == "eager"
        apart = 1.0 * (not torch.equal(self.out, self.bare)) if exact else 0.0
        self.row.check("outputs", max(apart, far(self.out[self.real], self.bare[self.real])))

    def compare_with_transformers(self):
        """Patterns, states and visible keys, with what transformers gives by itself."""
        last, mids, handles = [], [], []
        last_module = self.modules[self.blocks[-1].path]
        handles.append(last_module.register_forward_hook(lambda m, a, out: last.append(out)))
        for path in dict.fromkeys(block.path for block in self.blocks):
            name = READS_MID.get(self.row.kind, "-")
            if name in dict(self.modules[path].named_children()):
                module = self.modules[f"{path}.{name}"]
                keep = lambda m, args, kw: mids.append((args or tuple(kw.values()))[0])  # noqa: E731
                handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        settings = {"output_attentions": True, "output_hidden_states": True}
        try:
            found = self.plain(self.ids, **self.kwargs, **settings)
        except TypeError:
            self.row.notes.add("transformers gives no patterns of it")
            return
        finally:
            for handle in handles:
                handle.remove()
        attentions = found.get("attentions") or found.get("encoder_attentions") or ()
        attentions = [one for one in attentions if one is not None]
        states = found.get("hidden_states") or found.get("encoder_hidden_states") or ()
        if self.row.kind == "squeezebert":  # transformers gives its scores
            attentions = [one.softmax(-1) for one in attentions]
        if self.row.kind == "funnel":
            attentions, states = attentions[: len(self.blocks)], states[: len(self.blocks) + 1]
        if len(attentions) == len(self.attending):
            for layer, expected in zip(self.attending, attentions):
                self.compare_pattern(layer, expected)
        else:
            self.row.notes.add(f"transformers gives {len(attentions)} patterns")
        if len(states) == len(self.blocks) + 1 and all(block.axes for block in self.blocks):
            end = last[-1] if isinstance(last[-1], torch.Tensor) else last[-1][0]
            states = [*states[:-1], end.permute(self.blocks[-1].axes)]
            for layer in range(len(self.blocks)):
                for name, place in (("hook_resid_pre", layer), ("hook_resid_post", layer + 1)):
                    state = self.of_block(layer, name)
                    if state.shape[1] == N_POS:
                        self.row.check("states", far(state[self.real], states[place][self.real]))
        with_mid = [i for i in self.attending if self.blocks[i].mid is not None]
        mids = [mids[i] for i in with_mid] if len(mids) == len(self.blocks) else mids
        for layer, expected in zip(with_mid, mids if len(mids) == len(with_mid) else ()):
            state = self.of_block(layer, "hook_resid_mid")
            if expected.ndim == 3:
                expected = expected.permute(self.blocks[layer].axes)
            if state.shape[1] == N_POS:
                expected = expected.reshape(state.shape)
                self.row.check("resid_mid", far(state[self.real], expected[self.real]))

    def compare_pattern(self, layer, expected):
        pattern = self.of_block(layer, "attn.hook_pattern")
        if pattern.shape[-2] != N_POS:
            self.row.notes.add("it pools positions")
            return
        if expected.shape != pattern.shape:
            same = expected.numel() == pattern.numel()
            expected = expected.reshape(pattern.shape) if same else expected[..., :N_POS]
        queries = self.real[:, None, :, None]
        self.row.check("patterns", float(((pattern - expected).abs() * queries).max()))
        visible = self.of_block(layer, "attn.hook_attn_scores") > -torch.inf
        self.row.check("visible keys", int((((expected > 0) != visible) & queries).sum()), 1)

    def compare_sums(self):
        for layer in self.attending:
            if self.blocks[layer].adds and self.blocks[layer].mlp_out:
                mixing = "hook_mixer_out" if self.blocks[layer].is_joined else "hook_attn_out"
                names = ("hook_resid_pre", mixing, "hook_mlp_out")
                total = sum(self.of_block(layer, name) for name in names)
                after = self.of_block(layer, "hook_resid_post")
                self.row.check("sums", far(total[self.real], after[self.real]))

    def compare_edits(self):
        """Head 1 loses its pattern; by hand, z of that head is 0 where W_O reads it."""

        def zero(pattern, hook):
            return pattern.index_fill(1, torch.tensor([1]), 0)

        for layer in self.attending:
            found = self.blocks[layer].attentions
            names = [f"attn{f'_{n}' if n else ''}" for n in range(len(found))]
            hooks = [(f"blocks.{layer}.{name}.hook_pattern", zero) for name in names]
            edited = self.named.run_with_hooks(self.ids, **self.kwargs, fwd_hooks=hooks)
            reach = far(edited[self.real], self.bare[self.real])
            self.row.check("edits", 0.0 if reach > 1e-6 else 1.0)
            if found[0].output is None or len(found) > 1 or self.row.kind == "xlnet":
                continue
            turn = [i for i in self.attending if self.blocks[i].path == self.blocks[layer].path]
            expected = self.without_head(found[0], turn.index(layer))
            self.row.check("edits by hand", far(edited[self.real], expected[self.real]), 5 * BAR)

    def without_head(self, found, turn):
        calls = [0]

        def zero(module, args):
            calls[0] += 1
            if calls[0] - 1 != turn:
                return None
            z = args[0].clone()
            z.view(-1, found.n_heads, found.d_head)[:, 1] = 0
            return (z, *args[1:])

        handle = self.modules[found.output.path].register_forward_pre_hook(zero)
        try:
            return self.plain(self.ids, **self.kwargs)[0]
        finally:
            handle.remove()

    def compare_visible_keys(self):
        """By brute force, in the plain model: which z move with the vector of a key."""
        for layer in self.attending:
            block, found = self.blocks[layer], self.blocks[layer].attentions[0]
            alone = [b.path for b in self.blocks].count(block.path) == 1
            whole = self.of_block(layer, "attn.hook_pattern").shape[-2:] == (N_POS, N_POS)
            if block.axes != (0, 1, 2) or not found.output or not (alone and whole):
                continue
            seen = self.z_by_key(block, found)
            visible = self.of_block(layer, "attn.hook_attn_scores") > -torch.inf
            pattern = self.of_block(layer, "attn.hook_pattern")
            if seen is None or visible.shape[-2:] != seen.shape[-2:]:
                continue
            counts = ~torch.eye(N_POS, dtype=bool) & self.real[:, None, :, None]  # own queries move
            counts = counts & ((pattern == 0) | (pattern > 1e-5))  # less is lost in rounding
            apart = int(((seen != visible.expand_as(seen)) & counts).sum())
            self.row.check("visible keys by brute force", apart, 1)

    def z_by_key(self, block, found):
        """bool [batch, head, query, key]."""
        caught, place = [], [None]
        noise = torch.randn(2, self.named.cfg.d_model, generator=torch.Generator().manual_seed(5))

        def change(module, args, kwargs):
            if place[0] is None:
                return None
            stream = next(t for t in (*args, *kwargs.values()) if getattr(t, "ndim", 0) == 3)
            moved = stream.clone()
            moved[:, place[0]] += noise
            args = tuple(moved if t is stream else t for t in args)
            return args, {name: moved if t is stream else t for name, t in kwargs.items()}

        keep = lambda m, args: caught.append(args[0].clone())  # noqa: E731
        handles = [
            self.modules[block.path].register_forward_pre_hook(change, with_kwargs=True),
            self.modules[found.output.path].register_forward_pre_hook(keep),
        ]
        for key in (None, *range(N_POS)):
            place[0] = key
            self.plain(self.ids, **self.kwargs)
        for handle in handles:
            handle.remove()
        if (
            len(caught) != N_POS + 1
            or caught[0].numel() != 2 * N_POS * found.n_heads * found.d_head
        ):
            return None
        before, *after = (z.reshape(2, N_POS, found.n_heads, -1) for z in caught)
        moves = [(z != before).any(-1).transpose(1, 2) for z in after]
        return torch.stack(moves, -1)

    def compare_shares(self):
        """Parts of the last state, through the final norm, against differences of two logits."""
        try:
            parts = self.cache.decompose_resid()
            shares = self.cache.logit_attrs(parts, torch.tensor(5), torch.tensor(7)).sum(0)
        except InfoFlowError:
            return
        weight, bias = self.named.W_U, self.named.unembed.b_U
        if "ln_final" in dict(self.named.named_children()):
            bias = bias + self.named.ln_final.numbers().bias @ weight
        margin = self.bare[..., 5] - self.bare[..., 7] - (bias[5] - bias[7])
        self.row.check("shares", far(shares, margin), 1e-4)

    def compare_derivatives(self):
        """Forward ones of the last state by the embedding, with those of the copy."""
        state = f"blocks.{len(self.blocks) - 1}.hook_resid_post"
        pattern = f"blocks.{self.attending[0]}.attn.hook_pattern"
        if state not in self.named.hook_dict:
            return

        def opened(vectors):
            kept = []
            hooks = [(state, lambda t, hook: kept.append(t)), (pattern, lambda t, hook: t * 1.0)]
            self.named.run_with_hooks(inputs_embeds=vectors, fwd_hooks=hooks)
            return kept[0]

        def plain(vectors):
            kept = []
            keep = lambda m, a, out: kept.append(out if torch.is_tensor(out) else out[0])  # noqa: E731
            handle = self.modules[self.blocks[-1].path].register_forward_hook(keep)
            try:
                self.plain(inputs_embeds=vectors)
            finally:
                handle.remove()
            return kept[-1].permute(self.blocks[-1].axes)

        try:
            e = self.plain.get_input_embeddings()(self.ids)
            u = torch.randn(e.shape, generator=torch.Generator().manual_seed(2))
            expected = torch.func.jvp(plain, (e.clone(),), (u.clone(),))[1]
        except Exception as error:  # of any kind: of embeddings that a model does not take, or of
            # functions that have no forward derivative
            self.row.notes.add(f"no derivative of the plain model ({type(error).__name__})")
            return
        found = torch.func.jvp(opened, (e.clone(),), (u.clone(),))[1]
        self.row.check("derivatives", far(found, expected), 1e-4)


def compare(kind, how):
    """The row of a type."""
    try:
        return Comparison(kind, how).run()
    except InfoFlowError as error:
        return Row(kind, how, refused=str(error))
    except (ValueError, TypeError) as error:
        if "attention implementation" not in str(error) and kind != "funnel":
            raise
        return Row(kind, how, refused=NOT_OFFERED)


_PAGE = """\
# Families

What `open_model` shows of {n_types} types of transformers against transformers alone: small random
models with eager and with fused attention (`sdpa`), unpadded and padded on either side. With eager
attention {n_eager} are right; with fused attention {n_sdpa}, of the {n_offered} types that have it.
`python -m tests.families --write` made this page, with transformers {version}.

Compared were {comparisons}.

A state that a model does not have, or does not make in one place, is not shown; `model.lacks()`
says why.

| type | eager | fused | not shown |
|---|---|---|---|
{rows}
"""


def page(rows):
    """The page of all rows."""
    by_kind, lines = {}, []
    for row in rows:
        by_kind.setdefault(row.kind, {})[row.how] = row
    for kind, found in by_kind.items():
        verdicts = [
            f"refused: {row.refused.partition(':')[0]}" if row.refused else row.verdict
            for row in (found["eager"], found["sdpa"])
        ]
        verdicts = ["" if NOT_OFFERED in verdict else verdict for verdict in verdicts]
        lacks = ", ".join(f"`{name}`" for name in sorted(found["eager"].lacks))
        lines.append(f"| {kind} | {' | '.join(verdicts)} | {lacks} |")
    total = sum((row.counts for row in rows), Counter())
    right = Counter(row.how for row in rows if row.verdict == "right")
    return _PAGE.format(
        n_types=len(by_kind),
        n_eager=right["eager"],
        n_sdpa=right["sdpa"],
        n_offered=sum(row.how == "sdpa" and NOT_OFFERED not in row.refused for row in rows),
        version=transformers.__version__,
        comparisons=", ".join(f"{n:,} {what}" for what, n in total.items()),
        rows="\n".join(lines),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="types of transformers; default, all")
    parser.add_argument("--part", type=int, help="a third of them, by a number")
    parser.add_argument("--write", action="store_true", help="write docs/families.md, of all")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kinds = asked.kinds or families.KINDS
    kinds = kinds if asked.part is None else kinds[asked.part % 3 :: 3]
    rows = []
    for kind in kinds:
        for how in ("eager", "sdpa"):
            rows.append(row := compare(kind, how))
            counts = ", ".join(f"{n} {what}" for what, n in row.counts.items())
            parts = [row.refused or counts, *row.wrong[:4], *sorted(row.notes)]
            print(f"{kind:18}{how:6}{row.verdict:8}{'; '.join(parts)}", flush=True)
    if asked.write:
        PAGE.write_text(page(rows))
    sys.exit(any(row.verdict == "WRONG" for row in rows))


if __name__ == "__main__":
    main()
