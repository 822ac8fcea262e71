"""The tap against plain transformers, plain torch, and brute force."""

import threading
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from infoflow_lens import InfoFlowError
from infoflow_lens.hooks.model.sites import rebuild
from infoflow_lens.hooks.model.tap import Tap
from tests.conftest import some_of
from tests.reference import families

N_POS = 7
# the module that reads z in the first layer, by type: its input is [batch, pos, head * d_head]
READS_Z = {
    "gpt2": "transformer.h.0.attn.c_proj",
    "gpt_neo": "transformer.h.1.attn.attention.out_proj",  # the layer with a window
    "gptj": "transformer.h.0.attn.out_proj",
    "bloom": "transformer.h.0.self_attention.dense",
    "opt": "model.decoder.layers.0.self_attn.out_proj",
    "llama": "model.layers.0.self_attn.o_proj",
    "mistral": "model.layers.0.self_attn.o_proj",
    "gemma2": "model.layers.0.self_attn.o_proj",
    "gpt_oss": "model.layers.0.self_attn.o_proj",
    "ctrl": "transformer.h.0.multi_head_attention.dense",
    "openai-gpt": "transformer.h.0.attn.c_proj",
    "bert": "bert.encoder.layer.0.attention.output.dense",
    "deberta": "deberta.encoder.layer.0.attention.output.dense",
    "xlm-roberta": "roberta.encoder.layer.0.attention.output.dense",
}
BLOCKS = {"gpt_neo": "transformer.h.1"}
FUSED = {"gpt2", "opt", "llama", "mistral", "bert", "xlm-roberta"}
CASES = [(kind, how) for kind in READS_Z for how in ("eager", "sdpa")]
CASES = [case for case in CASES if case[1] == "eager" or case[0] in FUSED]
ALWAYS = [("gpt2", "sdpa"), ("gpt_oss", "eager"), ("bloom", "eager"), ("llama", "sdpa")]
ALWAYS += [("deberta", "eager"), ("bert", "sdpa")]


def attentions(model, *args, **kwargs):
    """The attentions of a pass, and its output."""
    tap = Tap(batch=2)
    with torch.no_grad(), tap:
        output = model(*args, **kwargs)
    return [call for call in tap.calls if call.is_read], output


def seen_by_brute_force(model, kind, ids, kwargs):
    """bool [batch, head, query, key]: z of this head and query changes with the key's embedding."""
    modules, caught = dict(model.named_modules()), []
    block = modules[BLOCKS.get(kind, READS_Z[kind].split(".0.")[0] + ".0")]
    noise, place = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(5)), [None]

    def change(module, args, kwargs):
        if place[0] is None:
            return None
        stream = (args or (kwargs["hidden_states"],))[0].clone()
        stream[:, place[0]] += noise[:, 0]
        if args:
            return (stream, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": stream}

    handles = [
        block.register_forward_pre_hook(change, with_kwargs=True),
        modules[READS_Z[kind]].register_forward_pre_hook(lambda m, a: caught.append(a[0].clone())),
    ]
    with torch.no_grad():
        for key in (None, *range(N_POS)):
            place[0] = key
            model(ids, **kwargs)
    for handle in handles:
        handle.remove()
    before, *after = (z.reshape(2, N_POS, 4, -1) for z in caught)
    moved = [(z != before).any(-1).transpose(1, 2) for z in after]
    return torch.stack(moved, -1)


@pytest.mark.parametrize(("kind", "how"), some_of(CASES, *ALWAYS))
def test_patterns_and_visible_keys_are_those_of_the_plain_model(kind, how):
    plain, model = families.build(kind), families.build(kind, how)
    ids = families.tokens(N_POS)
    layer = 1 if kind == "gpt_neo" else 0
    for kwargs in families.masks(ids).values():
        real = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
        calls, output = attentions(model, ids, **kwargs)
        with torch.no_grad():
            bare = model(ids, **kwargs)[0]
            expected = plain(ids, **kwargs, output_attentions=True)
        if how == "eager":
            assert torch.equal(output[0], bare)
        assert torch.allclose(output[0][real], bare[real], atol=1e-5 * float(bare.abs().max()))
        weights = [w for w in expected.attentions if w is not None]
        assert len(calls) == len(weights) == 2
        for call, weight in zip(calls, weights):
            n_keys = call.seen["pattern"].shape[-1]
            gap = (call.seen["pattern"] - weight[..., :n_keys]) * real[:, None, :, None]
            assert gap.abs().max() < 1e-5
            # no weight of such a small model underflows
            visible = call.visible().expand_as(call.seen["pattern"])
            queries = real[:, None, :, None]
            assert torch.equal(visible & queries, (weight[..., :n_keys] > 0) & queries)
        moved = seen_by_brute_force(plain, kind, ids, kwargs)
        visible = calls[layer].visible().expand_as(moved)
        counts = real[:, None, :, None] & ~torch.eye(N_POS, dtype=bool)  # its own query moves, too
        assert torch.equal(visible & counts, moved & counts)


class Plain(nn.Module):
    """One attention, written as models write it."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, q, k, v, mask):
        scale = q.shape[-1] ** -0.5
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.how == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
        elif self.how == "baddbmm":
            flat = [t.flatten(0, 1) for t in (q, k)]
            base = mask.expand(*q.shape[:3], -1).flatten(0, 1)
            scores = torch.baddbmm(base, flat[0], flat[1].transpose(1, 2), alpha=scale)
            pattern = scores.softmax(-1)
            return torch.bmm(pattern, v.flatten(0, 1)).unflatten(0, q.shape[:2])
        else:
            scores = q @ k.transpose(-1, -2) * scale
        if self.how == "where":
            scores = torch.where(mask < 0, -1e4, scores)
        elif self.how == "method":
            scores = scores.where(mask == 0, torch.tensor(-1e4))
        elif self.how == "fill":
            scores = scores.masked_fill(mask < 0, torch.finfo(scores.dtype).min)
        elif self.how == "behind":
            pattern = (scores + mask).softmax(-1).masked_fill(mask=mask < 0, value=0.0)
            return pattern @ v
        elif self.how == "subtract":
            scores = scores - (mask < 0) * 1e4
        else:
            scores = scores + mask
        if self.how == "einsum":
            return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, dim=-1), v)
        return F.softmax(scores, dim=-1) @ v


def test_products_of_three_tensors_go_through():
    """Which of them are queries and keys is not known, and they ended in a ValueError."""
    (q, k, v), scale = torch.randn(3, 2, 3, 5, 4), torch.rand(3)

    def attend():
        pattern = torch.einsum("bhqd,bhkd,h->bhqk", q, k, scale).softmax(-1)
        return torch.einsum("bhqk,bhkd,h->bhqd", pattern, v, scale)

    with Tap() as tap:
        found = attend()
    assert found.equal(attend())
    assert [call.is_read for call in tap.calls] == [False]


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        ("einsum", ("bij,bkj", 0, 1), {}),  # whose output has the axes that stand once
        ("einsum", ("bij,bij->b", 0, 1), {}),
        ("einsum", ("...ij,...kj", 0, 1), {}),
        ("einsum", ("bij,bij", 0, 1), {}),
        ("baddbmm", (), {"input": 2, "batch1": 0, "batch2": 3}),
        ("baddbmm", (2,), {"batch1": 0, "batch2": 3, "beta": 2}),
        ("matmul", (), {"input": 0, "other": 3}),
        ("bmm", (), {"input": 0, "mat2": 3}),
    ],
)
def test_products_in_every_way_to_call_them_go_through(function, args, kwargs):
    """Some ended in a ValueError or an IndexError of the tap's."""
    given = [torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 3)]
    given.append(given[1].transpose(1, 2))
    args = [given[v] if isinstance(v, int) else v for v in args]
    kwargs = {k: given[v] if k != "beta" else v for k, v in kwargs.items()}
    with Tap():
        scores = getattr(torch, function)(*args, **kwargs)
        if scores.ndim > 2:
            torch.einsum("bij,bjk", scores.softmax(-1), given[0])
    assert scores.equal(getattr(torch, function)(*args, **kwargs))


def test_structures_are_rebuilt_as_what_they_are():
    """Blocks that give or take a named tuple ended in a TypeError."""
    pair = namedtuple("pair", "state cache")(1, 2)
    assert rebuild(pair, [3, 4]) == type(pair)(3, 4)
    assert [rebuild([1], [2]), rebuild((1,), [2])] == [[2], (2,)]


WAYS = ["sdpa", "behind", "einsum", "baddbmm", "where", "method", "fill", "subtract", "add"]


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3)]


@pytest.fixture
def mask():
    """Of packed sequences: positions 0 to 2, and 3 to 4, each causal."""
    open_keys = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0],
                              [0, 0, 0, 1, 1]], dtype=bool)  # fmt: skip
    return torch.zeros(1, 1, 5, 5).masked_fill(~open_keys, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("how", WAYS)
def test_each_way_to_write_attention_shows_all_sites(how, qkv, mask):
    q, k, v = qkv
    (call,), z = attentions(Plain(how), q, k, v, mask)
    scores = q @ k.transpose(-1, -2) / 2
    pattern = (scores + mask).softmax(-1)
    expected = {"q": q, "k": k, "v": v, "pattern": pattern, "z": pattern @ v}
    for site, tensor in expected.items():
        assert torch.allclose(call.seen[site], tensor, atol=1e-6), site
    open_keys = (mask == 0).expand(2, 3, -1, -1)
    assert torch.allclose(call.seen["scores"][open_keys], scores[open_keys], atol=1e-6)
    assert torch.equal(call.visible(), open_keys)
    assert torch.allclose(z, pattern @ v, atol=1e-6)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("site", ["q", "k", "scores", "pattern", "v", "z"])
def test_edits_go_on_as_if_the_model_had_them(how, site, qkv, mask):
    q, k, v = (t.clone() for t in qkv)

    def halve(call, at, tensor):
        return tensor / 2 if at == site else None

    tap = Tap(halve, batch=2)
    tap.score_products = {0: 0}
    with tap:
        found = Plain(how)(*qkv, mask)
    q, k, v = (t / 2 if at == site else t for at, t in (("q", q), ("k", k), ("v", v)))
    scores = q @ k.transpose(-1, -2) / 2
    masked = scores.masked_fill(mask < 0, -torch.inf) * (0.5 if site == "scores" else 1)
    expected = masked.softmax(-1) @ v * (0.5 if site in ("pattern", "z") else 1)
    assert torch.allclose(found, expected, atol=1e-6)


def test_half_precision_that_underflows_closes_no_key(qkv, mask):
    """Weights of 0 are no mask: queries are 256 times as large."""
    q, k, v = (t.half() for t in qkv)
    for how in ("sdpa", "add", "fill"):
        lowest = mask.clamp(min=torch.finfo(torch.float16).min).half()
        (call,), _ = attentions(Plain(how), q * 256, k, v, lowest)
        assert (call.seen["pattern"] == 0)[call.visible()].any()
        assert torch.equal(call.visible(), (mask == 0).expand(2, 3, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_in_half_precision_are_those_of_the_kernel(dtype, is_causal):
    """They were rounded before the softmax, which named another first key than the kernel reads."""
    generator = torch.Generator().manual_seed(0)
    q, k = (4 * torch.randn(2, 3, 16, 8, generator=generator).to(dtype) for _ in range(2))
    # with unit vectors as values the kernel itself gives its pattern
    values = torch.eye(16, dtype=dtype).expand(2, 3, 16, 16)
    kernel = F.scaled_dot_product_attention(q, k, values, is_causal=is_causal).float()
    with Tap() as tap:
        F.scaled_dot_product_attention(q, k, values, is_causal=is_causal)
    pattern = tap.calls[0].seen["pattern"].float()
    assert torch.allclose(pattern, kernel, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    read = kernel.gather(-1, pattern.argmax(-1, keepdim=True))
    assert read.equal(kernel.amax(-1, keepdim=True))


def test_queries_without_keys_get_what_fused_attention_gives_them(qkv):
    nothing = torch.zeros(1, 1, 5, 5, dtype=bool)
    q, k, v = qkv
    (call,), z = attentions(Plain("sdpa"), q, k, v, nothing)
    assert torch.equal(z, F.scaled_dot_product_attention(q, k, v, attn_mask=nothing))
    assert not call.visible().any()


def test_grouped_keys_and_more_keys_than_queries(qkv):
    q, k, v = qkv
    k, v = k[:, :1], v[:, :1]
    model = lambda *args: F.scaled_dot_product_attention(*args, enable_gqa=True)  # noqa: E731
    (call,), z = attentions(model, q[:, :, -1:], k, v)
    assert call.is_grouped
    assert [tuple(call.seen[site].shape) for site in ("k", "v", "pattern")] == [
        (2, 1, 5, 4), (2, 1, 5, 4), (2, 3, 1, 5)]  # fmt: skip
    assert torch.allclose(z, F.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True))


@pytest.mark.parametrize("mode", ["mask", "causal", "weights", "fast"])
def test_multihead_attention_of_torch_is_seen(mode):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    causal = torch.ones(5, 5, dtype=bool).triu(1)
    settings = {
        "mask": {"key_padding_mask": torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()},
        "causal": {"attn_mask": causal, "is_causal": True},
        "weights": {"attn_mask": causal, "need_weights": True},
        "fast": {},
    }[mode]
    settings = {"need_weights": False, **settings}
    (call,), (z, _) = attentions(layer, x, x, x, **settings)
    settings["need_weights"] = True
    with torch.no_grad():
        expected, weights = layer(x, x, x, **settings, average_attn_weights=False)
    assert torch.allclose(z, expected, atol=1e-6)
    assert torch.allclose(call.seen["pattern"], weights, atol=1e-6)
    assert torch.equal(call.visible().expand_as(weights), weights > 0)


def test_a_softmax_that_no_product_reads_is_no_attention():
    tap = Tap()
    with tap:
        (torch.ones(2, 3, 4) @ torch.ones(2, 4, 5)).softmax(-1).topk(2)
    assert [call.is_read for call in tap.calls] == [False]


def test_the_tap_is_of_its_thread_alone_and_looks_aside(qkv, mask):
    tap, found = Tap(batch=2), []
    with tap:
        thread = threading.Thread(target=lambda: found.append(Plain("add")(*qkv, mask)))
        thread.start()
        thread.join()
        with tap.aside():
            Plain("add")(*qkv, mask)
        assert not tap.calls
        Plain("add")(*qkv, mask)
    assert len(found) == len(tap.calls) == 1


@pytest.mark.parametrize("how", ["sdpa", "add"])
def test_derivatives_and_batches_of_functions_go_through(how, qkv, mask):
    """Forward derivatives, which fused attention does not have, and vmap."""
    q, k, v = qkv

    def pattern_of(q):
        seen = []
        tap = Tap(lambda call, site, t: seen.append(t) if site == "pattern" else None, batch=2)
        with tap:
            Plain(how)(q, k, v, mask)
        return seen[0]

    def by_hand(q):
        return (q @ k.transpose(-1, -2) / 2 + mask).softmax(-1)

    steps = torch.randn(3, *q.shape, generator=torch.Generator().manual_seed(2))
    for function in (
        lambda f: torch.func.jvp(f, (q,), (steps[0],))[1],
        lambda f: torch.vmap(lambda step: torch.func.jvp(f, (q,), (step,))[1])(steps),
        lambda f: torch.func.vjp(f, q)[1](torch.ones(2, 3, 5, 5))[0],
    ):
        assert torch.allclose(function(pattern_of), function(by_hand), atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_refused():
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    q = torch.randn(1, 2, 16, 8)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(InfoFlowError, match='expected set_attn_implementation\\("eager"\\)'),
        Tap(),
    ):
        attention.flex_attention(q, q, q)
