"""Every way into the probes shows of a sequence in a batch what the sequence alone shows.

Or it refuses by name: run_probes, attach, fwd_hooks and probe_cache, with padding on either side or
none, on models that show their scores and on models that show the pattern in their place, in single
and half precision, with scores so large that masks are rounded into their range.
"""

import dataclasses
from itertools import product

import pytest
import torch

import infoflow_lens
from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    ask,
    attach,
    flow,
    inspect_model,
    label_heads,
    load_any,
    open_model,
    run_probes,
)
from infoflow_lens.hooks import (
    Intervention,
    LogitDifference,
    Pass,
    PatternsProbe,
    measure_shares,
    measure_why,
    measure_why_all,
    probe_cache,
    run,
)
from infoflow_lens.hooks.model.call import has_user_hooks
from infoflow_lens.hooks.model.semantics import visibility
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from tests.conftest import some_of, spread
from tests.hooks.test_invariants import EVERY, assert_equal, hosted, is_refused, vectors
from tests.reference import zoo

LENGTHS = (4, 9, 6, 3, 8)
SHOWN = {"gpt2": "scores", "llama": "scores", "codegen": "scores", "opt": "pattern"}


def loaded(family, dtype="float32", times=1.0):
    """A bridge, with scores so many times as large."""
    model = zoo.bridge(family, getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # queries alone, also where they share a matrix with keys and values
            if times != 1 and ("q_proj" in name or ".attn.q." in name) and parameter.ndim == 2:
                parameter.mul_(times)
    return model


def rows():
    ids = zoo.tokens(len(LENGTHS), max(LENGTHS))
    return [row[:n] for row, n in zip(ids, LENGTHS, strict=True)]


def padded(side):
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows()):
        place = slice(max(LENGTHS) - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def through_run_probes(model, probe, side):
    ids, mask = padded(side)
    return run_probes(model, ids, [probe], attention_mask=mask, progress=False)[0]


def through_attach(model, probe, side):
    ids, mask = padded(side)
    with attach(model, probe), torch.no_grad():
        model(ids, attention_mask=mask)
    return probe.result()


def through_hooks(model, probe, side):
    ids, mask = padded(side)
    with torch.no_grad():
        model.run_with_hooks(ids, attention_mask=mask, fwd_hooks=probe.fwd_hooks(model))
    return probe.result()


def through_cache(model, probe, side, tell=True):
    ids, mask = padded(side)
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, attention_mask=mask)
    told = {"attention_mask": mask} if tell else {}
    return probe_cache(model, cache, [probe], tokens=ids, **told)[0]


def through_cache_untold(model, probe, side):
    return through_cache(model, probe, side, tell=False)


TAKES_PADDING = (through_run_probes, through_attach)
MAY_REFUSE = (through_hooks, through_cache, through_cache_untold)


WITH_PADDING = some_of(SHOWN, "gpt2")


@pytest.mark.parametrize("family", WITH_PADDING)
def test_padding_shows_what_each_sequence_alone_shows(family):
    """For every third probe by entrances in turn, or it is refused; on both sides in turn.

    An entrance knows no kind of probe, and every probe meets padding in test_invariants.
    """
    model, x = loaded(family), zoo.tokens(len(LENGTHS), max(LENGTHS))
    assert inspect_model(model).layers[0].scores == SHOWN[family]
    for place, (name, make) in list(enumerate(EVERY.items()))[::3]:
        if is_refused(name, f"bridge, {family}"):
            continue
        (alone,) = run_probes(model, rows(), [make(x)], batch_size=1, progress=False)
        turn = place + list(SHOWN).index(family)
        for number, entrance in list(enumerate((*TAKES_PADDING, *MAY_REFUSE)))[turn % 2 :: 2]:
            side = ("left", "right")[(turn // 2 + number) % 2]
            try:
                found = entrance(model, make(x), side)
            except InfoFlowError:
                assert entrance in MAY_REFUSE, (entrance, side, type(make(x)))
                continue
            assert entrance not in (through_hooks, through_cache_untold)  # must refuse
            assert_equal(found, alone, tolerance=2e-4)


UNTOLD = ["gpt2", "gpt_neo", "opt", "bert"], [1, 3]


@pytest.mark.parametrize(("family", "n_padding"), some_of(list(product(*UNTOLD)), *spread(*UNTOLD)))
def test_padding_that_nobody_told_of_is_refused(family, n_padding):
    """GPT-Neo lets padding on the left attend to itself."""
    model, ids = loaded(family), zoo.tokens(2, 8, seed=2)
    for place in (slice(0, n_padding), slice(8 - n_padding, 8)):
        mask = torch.ones_like(ids)
        mask[1, place] = 0
        with torch.no_grad():
            _, whole = model.run_with_cache(ids)
            _, padded = model.run_with_cache(ids, attention_mask=mask)
        probe_cache(model, whole, [PositionsProbe()])
        with pytest.raises(InfoFlowError, match="as with padding"):
            probe_cache(model, padded, [PositionsProbe()])


# CodeGen runs in none but single
@pytest.mark.parametrize("family", some_of(["gpt2", "llama", "opt"], "opt"))
def test_a_model_may_change_its_precision(family):
    """Masks are other numbers there."""
    model = loaded(family)
    (whole,) = run_probes(model, rows(), [PositionsProbe()], progress=False)
    for dtype in ("float16", "float32"):
        (found,) = run_probes(
            model.to(getattr(torch, dtype)), rows(), [PositionsProbe()], progress=False
        )
        (fresh,) = run_probes(loaded(family, dtype), rows(), [PositionsProbe()], progress=False)
        assert found.lengths.equal(fresh.lengths)
        for one, other in zip(found.positions, fresh.positions, strict=True):
            assert one.equal(other)
    for one, other in zip(found.positions, whole.positions, strict=True):
        assert one.float().eq(other).float().mean() > 0.9  # half precision rounds ties


MODELS_AND_IDS = {
    **{family: lambda family=family: (loaded(family), zoo.tokens(10, 7)) for family in SHOWN},
    "hosted, vector tokens": lambda: (hosted(), vectors(10)),
}


@pytest.mark.parametrize("name", MODELS_AND_IDS)
def test_without_padding_all_entrances_agree(name):
    model, ids = MODELS_AND_IDS[name]()
    for place, (probe, make) in enumerate(EVERY.items()):
        if place % len(MODELS_AND_IDS) != list(MODELS_AND_IDS).index(name):
            continue
        if is_refused(probe, f"bridge, {name}"):
            continue
        (expected,) = run_probes(model, ids, [make(ids)], progress=False)
        hooked, attached = make(ids), make(ids)
        with torch.no_grad():
            alone, cache = model.run_with_cache(ids)
            (cached,) = probe_cache(model, cache, [make(ids)], tokens=ids)
            model.run_with_hooks(ids, fwd_hooks=hooked.fwd_hooks(model))
            with attach(model, attached):
                seen, under_a_probe = model.run_with_cache(ids)
        assert seen.equal(alone)
        assert all(value.equal(under_a_probe[key]) for key, value in cache.items())
        by_hooks = hooked.result()
        if isinstance(hooked, Intervention):  # hooks see no tokens, and so no loss of the next one
            assert by_hooks.rise.isnan().all()
            assert by_hooks.bare.isnan().all()
            more = {name: getattr(expected, name) for name in ("rise", "bare", "n_tokens")}
            by_hooks = dataclasses.replace(by_hooks, **more)
        for found in (cached, by_hooks, attached.result()):
            assert_equal(found, expected, tolerance=2e-4)


def seen_by_config(config, layer, n):
    """The keys that each query sees, by the settings of the Hugging Face model."""
    query, key = torch.arange(n)[:, None], torch.arange(n)[None]
    if config.model_type == "bert":
        return torch.ones(n, n, dtype=torch.bool)
    window = n
    if config.model_type == "gpt_neo":
        window = config.window_size if config.attention_layers[layer] == "local" else n
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * (layer + 1)
    if kinds[layer] == "sliding_attention":
        window = getattr(config, "sliding_window", None) or window
    return (key <= query) & (query - key < window)


# TransformerLens runs no CodeGen in half precision, and 3 has other logits for Cohere
LOADED = [f for f in zoo.FAMILIES if not (HAS_HOOKED_TRANSFORMER and f.startswith("cohere"))]
# each in one precision; masks are the same in all three
IN_PRECISION = [
    (family, "float32" if family == "codegen" else ("bfloat16", "float16", "float32")[i % 3])
    for i, family in enumerate(LOADED)
]


@pytest.mark.parametrize(("family", "dtype"), zoo.some_families(IN_PRECISION))
def test_visible_keys_are_those_of_the_models_config(family, dtype):
    """Also where scores are four times as large, and a mask of half precision is rounded."""
    model = loaded(family, dtype, times=4.0)
    config = model.original_model.config
    known = visibility(model, 16)
    assert known is not None
    for layer, keys in enumerate(known):
        assert keys[:16, :16].equal(seen_by_config(config, layer, 16)), layer


RANKED = ("gpt2", "llama", "codegen", "bloom", "gpt_neo")


@pytest.mark.parametrize(("family", "dtype"), [case for case in IN_PRECISION if case[0] in RANKED])
def test_only_visible_keys_have_a_rank_or_a_weight(family, dtype):
    """And all of them have one, where the model shows its scores."""
    model = loaded(family, dtype, times=4.0)
    ids, n = zoo.tokens(4, 9), 9
    ranks = tuple(range(1, n + 1))
    positions, patterns = run_probes(
        model, ids, [PositionsProbe(ranks), PatternsProbe()], progress=False
    )
    shown = inspect_model(model).layers
    for layer, chosen in enumerate(positions.positions):
        visible = seen_by_config(model.original_model.config, layer, n)
        for query in range(n):
            allowed = set(visible[query].nonzero().flatten().tolist())
            for row in chosen[:, :, query].flatten(0, 1).tolist():
                ranked = [key for key in row if key >= 0]
                assert set(ranked) <= allowed
                if shown[layer].scores == "scores":
                    assert set(ranked) == allowed
        assert (patterns.patterns[layer].masked_fill(visible, 0) == 0).all()


def longrope(folder):
    factors = {"short_factor": [1.0, 1.0], "long_factor": [4.0, 8.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    rope["original_max_position_embeddings"] = 5
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 5}
    return load_any(zoo.save("phi3", folder, **changes)).model


def dynamic(folder):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    changes = {"rope_parameters": rope, "max_position_embeddings": 8}
    return load_any(zoo.save("llama", folder, **changes)).model


def test_sequences_of_a_model_that_depends_on_their_length_run_length_by_length(tmp_path):
    """Frequencies of longrope are those of the longest sequence of a batch."""
    model = longrope(tmp_path)
    (together,) = run_probes(model, rows(), [PositionsProbe((1, 2))], progress=False)
    for index, row in enumerate(rows()):
        (alone,) = run_probes(model, row[None], [PositionsProbe((1, 2))], progress=False)
        for one, other in zip(together.positions, alone.positions, strict=True):
            assert one[index : index + 1, :, : len(row), :].equal(other)


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_a_padded_call_of_such_a_model_is_refused(make, tmp_path):
    model = make(tmp_path)
    ids, mask = padded("right")
    message = "depend on the longest sequence"
    with (
        attach(model, PositionsProbe()) as probes,
        torch.no_grad(),
        pytest.raises(InfoFlowError, match=message),
    ):
        model(ids[:, :8], attention_mask=mask[:, :8])
    assert probes[0].n_sequences == 0


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_frequencies_that_a_pass_writes_are_no_change_of_weights(make, tmp_path):
    model = make(tmp_path)
    with attach(model, PositionsProbe()) as probes, torch.no_grad():
        for length in (4, 9, 3):
            model(zoo.tokens(2, length))
    assert probes[0].n_sequences == 6


@pytest.mark.parametrize("family", ["opt", "gptj", "gpt_neo", "bert", "llama"])
def test_peaked_attention_closes_no_key(family):
    """Weights that underflow to 0 in every head of every sequence are of open keys all the same."""
    model = loaded(family, times=300.0)
    known = visibility(model, 20)
    assert known is not None
    for layer, keys in enumerate(known):
        assert keys[:20, :20].equal(seen_by_config(model.original_model.config, layer, 20))
    ids = zoo.tokens(6, 20, seed=3)
    positions, patterns = run_probes(
        model, ids, [PositionsProbe(), PatternsProbe()], progress=False
    )
    for chosen, pattern in zip(positions.positions, patterns.patterns, strict=True):
        weight = pattern.gather(-1, chosen.long())[..., 0]
        assert weight.equal(pattern.amax(dim=-1))


def test_a_hook_that_runs_the_model_again_is_refused():
    """The measured pass would be of layers of two."""
    model, ids, busy = loaded("gpt2"), zoo.tokens(4, 7), []

    def again(activation, hook):
        if not busy:
            busy.append(1)
            model(ids.flip(0))
            busy.clear()

    with (
        model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", again)]),
        torch.no_grad(),
        pytest.raises(InfoFlowError, match="fired twice in one call"),
    ):
        run_probes(model, ids, [PositionsProbe()], progress=False)


def test_hooks_that_libraries_leave_on_a_model_are_not_the_users():
    """transformers puts some in place that stay; passes end early all the same."""
    model, ids = loaded("llama"), zoo.tokens(2, 7)
    with torch.no_grad():
        model.run_with_cache(ids)
    assert not has_user_hooks(model)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda activation, hook: None)]):
        assert has_user_hooks(model)


@pytest.mark.parametrize("change", ["a head by .data", "a module more"])
def test_edits_of_single_heads_and_added_weights_are_noticed(change):
    model, ids = loaded("llama"), zoo.tokens(2, 7)
    probe = PositionsProbe()
    with attach(model, probe), torch.no_grad():
        model(ids)
        layer = model.original_model.model.layers[0].self_attn
        if change == "a module more":
            layer.register_parameter("lora", torch.nn.Parameter(torch.ones(2)))
            with pytest.raises(InfoFlowError, match="weights changed between two passes"):
                model(ids)
            return
        next(p for n, p in model.named_parameters() if "o_proj" in n).data[:, 4:8] = 0
        model(ids)
    with pytest.raises(InfoFlowError, match=r"written through parameter\.data"):
        probe.result()


def test_embeddings_given_by_name_come_with_their_mask():
    model = loaded("llama")
    ids, mask = padded("left")
    with torch.no_grad():
        embedded = model.original_model.get_input_embeddings()(ids)
        with attach(model, PositionsProbe()) as probes:
            model(None, inputs_embeds=embedded, attention_mask=mask)
    assert probes[0].result().lengths.tolist() == list(LENGTHS)


def test_weights_that_are_nan_are_no_weights_on_padding():
    """NaN has its own error, also where a bridge shows the pattern alone."""
    model = loaded(next(family for family, shown in SHOWN.items() if shown == "pattern"))
    ids, mask = padded("right")
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(len(model.blocks))]
    _, cache = model.run_with_cache(ids, attention_mask=mask, names_filter=names)
    broken = {name: torch.full_like(cache[name], 0.1) for name in names}
    for pattern in broken.values():
        pattern[..., 0] = torch.nan  # as where a score overflows, and the rest of its row is spread
    with pytest.raises(InfoFlowError, match="holds NaN"):
        Pass(model, broken, tokens=ids, mask=mask.bool())


def test_an_inference_mode_of_the_users_changes_no_number():
    """Reasons and shares were 0 there, in silence; questions and flows failed in torch."""
    model = zoo.build("llama")

    def measure():
        ids, other = zoo.tokens(2, 7).clone().split(1)  # made in that mode, too
        answer = ask(model, ids, 7, 3, other, quick=True, progress=False)
        return [
            measure_shares(model, ids, LogitDifference(7, 3)).values,
            measure_why(model, ids, 1, 2).pieces,
            torch.cat(measure_why_all(model, ids).values),
            flow(model, ids, progress=False).influence.influence,
            torch.tensor(answer.to_frame("heads")["estimate"].to_numpy()),
        ]

    expected = measure()
    assert all(bool(one.any()) for one in expected)
    for trains in (True, False):
        model.requires_grad_(trains)
        with torch.inference_mode():
            found = measure()
            assert torch.is_inference_mode_enabled()
        with torch.no_grad():
            assert not run(model, zoo.tokens(1, 7), output=True).output.requires_grad
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


def test_a_default_device_of_the_users_changes_no_number():
    """In a notebook that begins with set_default_device("cuda"), say; "meta" has no numbers."""
    model, ids = zoo.build("llama"), zoo.tokens(6, 7)

    def attached():
        with attach(model, JacobianInfluence(), PositionsProbe()) as probes:
            model(ids)
        return probes.results()[0].influence

    def measure():
        named = open_model(model)
        answer = ask(named, ids[:1], 7, 3, ids[1:2], quick=True, progress=False)
        results = run_probes(named, ids, [RecoveryProbe((1,)), PatternsProbe()], progress=False)
        return [
            attached(),
            results[0].fvu[0],
            label_heads(named, ids, worthiest=0, progress=False).worth[0],
            measure_shares(named, ids[:1], LogitDifference(7, 3)).values,
            infoflow_lens.probe(
                named, ids, probes=("influence", "routes"), progress=False
            ).influence.influence,
            torch.tensor(answer.to_frame("heads")["estimate"].to_numpy(), device="cpu"),
        ]

    expected = measure()
    with torch.device("meta"):
        found = measure()
        assert torch.get_default_device().type == "meta"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_a_model_whose_code_measures_has_its_default_device_in_every_pass():
    """The inner block forgot the device of the outer one, which ended in an AttributeError."""
    model, ids, seen = zoo.build("llama"), zoo.tokens(2, 7), []

    def measure(module, args):
        seen.append(torch.get_default_device().type)
        run_probes(other, ids, [PositionsProbe()], progress=False)
        seen.append(torch.get_default_device().type)

    other, named = open_model(zoo.build("llama")), open_model(model)
    handle = model.model.layers[0].register_forward_pre_hook(measure)
    with torch.device("meta"):
        run_probes(named, ids, [PositionsProbe()], batch_size=1, progress=False)
        assert torch.get_default_device().type == "meta"
    handle.remove()
    assert seen
    assert set(seen) == {"meta"}


def test_weights_that_are_loaded_in_inference_mode_have_derivatives(tmp_path):
    with torch.inference_mode():
        model = load_any(zoo.save("gpt2", tmp_path), backend="auto").model
    assert not any(weights.is_inference() for weights in model.parameters())


def test_weights_that_were_made_in_inference_mode_are_refused_where_derivatives_are_asked():
    """torch's own error said nothing of the remedy; what needs no derivatives measures."""
    with torch.inference_mode():
        model = zoo.build("llama")
    run_probes(model, zoo.tokens(2, 7), [PositionsProbe()], progress=False)
    ids, other = zoo.tokens(2, 7).split(1)
    for measure in (
        lambda: measure_shares(model, ids, LogitDifference(7, 3)),
        lambda: measure_why(model, ids, 1, 2),
        lambda: ask(model, ids, 7, 3, other, quick=True, progress=False),
        lambda: flow(model, ids, progress=False),
    ):
        with pytest.raises(InfoFlowError, match="make or load the model outside of that block"):
            measure()
