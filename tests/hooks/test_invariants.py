"""What holds for every probe on every kind of model.

Probes are found from the class `Probe` itself, so that the next probe cannot be forgotten: without
an entry in MAKES a test fails.
"""

import copy
import gc
import inspect
import random
import tempfile
import weakref
from itertools import product

import numpy as np
import pytest
import torch

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    attach,
    build_model,
    run_probes,
)
from infoflow_lens.foundation.memory import bytes_in
from infoflow_lens.hooks import (
    AllHeads,
    AttendedProbe,
    AttentionFlow,
    AttentionRollout,
    AttentionWeight,
    ContributionRoutes,
    EditsOfPass,
    GradedSetsProbe,
    GradientTimesInput,
    HeadIdeals,
    Intervention,
    MeanPatternsProbe,
    PatternsProbe,
    PowerRollout,
    Probe,
    ResampleInfluence,
    Result,
    edit_head,
)
from infoflow_lens.hooks.influence.base import StateInfluence
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.host import build_token_model
from infoflow_lens.models.named import open_model
from tests.conftest import make_token_model, some_of, spread
from tests.reference import zoo

N, LENGTH = 12, 7
BRIDGES = ("gpt2", "gpt_neo", "bert")

MAKES = {
    PositionsProbe: [
        lambda x: PositionsProbe((1, 2), spread=True),
        lambda x: PositionsProbe((2,), without=(0,)),
    ],
    AttendedProbe: [lambda x: AttendedProbe()],
    RecoveryProbe: [
        lambda x: RecoveryProbe((1,), controls=True, blocks=2),
        lambda x: RecoveryProbe((1,), source="head", ridge=0.1, buffer_rows=9),
    ],
    JacobianInfluence: [
        lambda x: JacobianInfluence("resid_post", positions=(-1, 2)),
        lambda x: JacobianInfluence(positions=(-1,), estimate=3),
    ],
    ResampleInfluence: [lambda x: ResampleInfluence(x[:3])],
    PatternsProbe: [lambda x: PatternsProbe()],
    AttentionWeight: [lambda x: AttentionWeight()],
    AttentionRollout: [lambda x: AttentionRollout("max", positions=(-1, 2))],
    AttentionFlow: [lambda x: AttentionFlow()],
    ContributionRoutes: [lambda x: ContributionRoutes()],
    GradedSetsProbe: [
        lambda x: GradedSetsProbe("norm"),
        lambda x: GradedSetsProbe("weight", "weakest", positions=(-1, 2)),
    ],
    PowerRollout: [
        lambda x: PowerRollout(),
        lambda x: PowerRollout("small changes", "L2", positions=(-1, 2)),
    ],
    GradientTimesInput: [lambda x: GradientTimesInput("resid_post", layers=(0,))],
    MeanPatternsProbe: [lambda x: MeanPatternsProbe()],
    HeadIdeals: [lambda x: HeadIdeals(ideals=("gated", "top 2"))],
    EditsOfPass: [lambda x: EditsOfPass(empty_one_head)],
    AllHeads: [lambda x: AllHeads(None, {"two": {(0, 0): "largest", (1, 1): "even"}})],
}


def empty_one_head(plain):
    yield edit_head(plain, 1, 1, torch.zeros_like)


def token_ids(n=N):
    return torch.randint(4, 17, (n, LENGTH), generator=torch.Generator().manual_seed(4))


def vectors(n=N):
    return torch.randn(n, LENGTH, 3, generator=torch.Generator().manual_seed(4))


def hosted(**changes):
    settings = {"n_heads": (2, 3), "d_model": 12, "d_token": 3, "n_tokens": LENGTH, "d_mlp": 5}
    return build_model(Architecture(**(settings | changes)), seed=1)


def hosted_over_ids():
    return build_token_model(
        n_layers=2, n_heads=(2, 3), d_head=5, d_model=12, n_tokens=9, d_vocab=17, d_output=17,
        attention="softmax", seed=1,
    )  # fmt: skip


def opened(name, attention="eager"):
    model = zoo.build(name)
    model.set_attn_implementation(attention)
    return open_model(model)


MODELS = {
    "hosted, vector tokens": (lambda: hosted(), vectors),
    "hosted, ReLU attention": (lambda: hosted(attention="relu"), vectors),
    "token ids": (lambda: make_token_model(), token_ids),
    "grouped keys, rotary, attention only": (
        lambda: make_token_model(
            n_key_value_heads=2, positional_embedding_type="rotary", d_head=6, attn_only=True
        ),
        token_ids,
    ),
    # TransformerLens 3 has positions that enter every layer; 4 makes the model above a bridge
    **(
        {
            "shortformer": (
                lambda: make_token_model(positional_embedding_type="shortformer"),
                token_ids,
            )
        }
        if HAS_HOOKED_TRANSFORMER
        else {"hosted, token ids": (lambda: hosted_over_ids(), token_ids)}
    ),
    # scores are scores; the pattern stands in their place; norms behind the sums
    **{f"bridge, {name}": (lambda name=name: zoo.bridge(name), token_ids) for name in BRIDGES},
    # the object as it is given, with fused attention, and with norms behind the sums
    "opened, llama": (lambda: opened("llama", "sdpa"), token_ids),
    "opened, bert": (lambda: opened("bert"), token_ids),
}


def concrete(kind):
    for sub in kind.__subclasses__():
        yield from concrete(sub)
        if not inspect.isabstract(sub) and sub.__module__.startswith("infoflow_lens."):
            yield sub


def test_every_probe_is_held_to_the_invariants():
    assert set(concrete(Probe)) == set(MAKES)


EVERY = {
    f"{kind.__name__} {i}": make for kind, makes in MAKES.items() for i, make in enumerate(makes)
}


@pytest.fixture(scope="module")
def case_of():
    """A model and inputs by name, each made once."""
    made = {}

    def get(name):
        if name not in made:
            make, data = MODELS[name]
            made[name] = make(), data()
            with torch.no_grad():
                made[name][0](made[name][1])  # bridges put hooks of their own in place at first
        made[name][0].eval()
        return made[name]

    return get


def numbers(result):
    """All tensors of a result, by name."""
    found = {}
    for name, value in vars(result).items():
        for index, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, torch.Tensor):
                found[f"{name}.{index}"] = part
    return found


def assert_equal(one, other, tolerance=0.0):
    one, other = numbers(one), numbers(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        if value.is_floating_point():
            torch.testing.assert_close(
                value, other[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
            )
        else:
            assert value.equal(other[name]), name


def traces(model):
    """Everything that a probe could leave on a model or around it."""
    modules = list(model.modules())
    return {
        "class": type(model),
        "dict": {k: v for k, v in vars(model).items() if not k.startswith("_")}.keys(),
        "forward": model.__dict__.get("forward"),
        "hooks": [len(getattr(m, "fwd_hooks", ())) for m in modules],
        "raw hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules],
        "mode": [m.training for m in modules],
        "flags": {k: v for k, v in vars(model.cfg).items() if isinstance(v, (bool, int, str))},
        "needs gradients": [p.requires_grad for p in model.parameters()],
        "gradients": [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "weights": [p.detach().clone() for p in model.parameters()],
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "python": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_no_traces(model, before):
    after = traces(model)
    for name, value in before.items():
        if name == "weights":
            assert all(a.equal(b) for a, b in zip(value, after[name], strict=True))
        else:
            assert value == after[name], name


def first_block(model):
    """The module of the first block, which runs; an opened model has hook points beside it."""
    anatomy = getattr(model, "anatomy", None)
    return model.blocks[0] if anatomy is None else anatomy.blocks[0].module


def the_model_is_left_as_found(model, x, make):
    """With gradients, a frozen weight, a hook, and one block in training."""
    before, fired = traces(model), []
    output = model(x)
    getattr(output, "logits", output).square().mean().backward()
    frozen = next(first_block(model).parameters())
    frozen.requires_grad_(False)
    first_block(model).train()
    model.add_hook("blocks.0.hook_resid_pre", lambda activation, hook: fired.append(1))
    own = traces(model)
    try:
        run_probes(model, x, [make(x)], progress=False)
        assert_no_traces(model, own)
        fired.clear()
        with torch.random.fork_rng():  # for the dropout of the block in training
            model(x)
        assert fired == [1]
    finally:
        model.eval().zero_grad()
        model.reset_hooks()
        frozen.requires_grad_(True)
    assert_no_traces(model, before)


def the_model_is_left_as_found_after_an_exception(model, x, make):
    """In the probe, and in the model."""

    def fail(*args, **kwargs):
        raise RuntimeError("on the way")

    before = traces(model)
    for inside_model in (True, False):
        probe, handle = make(x), None
        if inside_model:
            handle = first_block(model).register_forward_pre_hook(fail)
        else:
            probe.update = fail
        with pytest.raises(RuntimeError, match="on the way"), attach(model, probe):
            model(x)
        if handle is not None:
            handle.remove()
        assert_no_traces(model, before)
        assert probe.n_sequences == 0


def blocks_end_in_any_order(model, x, make):
    before = traces(model)
    first, second = attach(model, make(x)), attach(model, make(x))
    one, other = first.__enter__(), second.__enter__()
    with torch.no_grad():
        model(x)
    first.__exit__(None, None, None)
    with torch.no_grad():
        model(x)
    second.__exit__(None, None, None)
    assert_no_traces(model, before)
    assert (one[0].n_sequences, other[0].n_sequences) == (N, 2 * N)


def batches_and_their_order_do_not_matter(model, x, make):
    (whole,) = run_probes(model, x, [make(x)], batch_size=N, progress=False)
    (parts,) = run_probes(model, x, [make(x)], batch_size=5, progress=False)
    # float32 kernels round by the size of the batch
    assert_equal(whole, parts, tolerance=2e-4)


def settling_changes_no_result(model, x, make):
    whole, settled = make(x), make(x)
    for probe in (whole, settled):
        with attach(model, probe), torch.no_grad():
            model(x[:5])
            if probe is settled:
                probe.settle()
            model(x[5:])
    settled.settle()
    assert_equal(settled.result(), whole.result(), tolerance=2e-4)
    assert settled.growing_bytes() <= bytes_in(settled.state_dict()["measured"])


def padding_on_either_side_does_not_matter(model, x, make):
    if x.is_floating_point():
        with pytest.raises((InfoFlowError, TypeError), match=r"attention_mask|mask"):
            model(x, attention_mask=torch.ones(x.shape[:2]))
        return
    if hasattr(model, "check_input") and isinstance(make(x), (StateInfluence, Intervention)):
        mask = torch.ones_like(x)
        mask[0, 0] = 0  # passes of the probe's own would begin without it
        with pytest.raises(InfoFlowError, match="without padding"), attach(model, make(x)):
            model(x, attention_mask=mask)
        return
    lengths = [LENGTH - i % 3 for i in range(6)]
    rows = [row[:n] for row, n in zip(x[:6], lengths, strict=True)]
    # an opened model looks positions up by the place in the row, as the model itself does, so that
    # behind padding it is another input
    shifts = hasattr(model, "anatomy") and model.anatomy.start.pos_embed is not None
    found = {}
    for side in ("left", "right"):
        ids = torch.zeros(6, LENGTH, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            place = slice(LENGTH - n, None) if side == "left" else slice(0, n)
            ids[i, place], mask[i, place] = row, 1
        if side == "left" and shifts and isinstance(make(x), (ResampleInfluence, Intervention)):
            # passes of their own, of donors and of edits, would be of other positions
            refusal = pytest.raises(InfoFlowError, match=r"at other positions|give position_ids")
            with refusal, attach(model, make(x)), torch.no_grad():
                model(ids, attention_mask=mask)
            continue
        with attach(model, make(x)) as probes, torch.no_grad():
            model(ids, attention_mask=mask)
        found[side] = probes[0].result()
    (alone,) = run_probes(model, rows, [make(x)], batch_size=1, progress=False)
    if not shifts:
        assert_equal(found["left"], alone, tolerance=2e-4)
    assert_equal(found["right"], alone, tolerance=2e-4)


def plain(value):
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def going_on_from_a_snapshot_equals_not_having_stopped(model, x, make):
    whole, first, second, third = make(x), make(x), make(x), make(x)
    run = {"progress": False, "batch_size": 4}
    empty = copy.deepcopy(whole.state_dict())
    run_probes(model, x, [whole], **run)
    with attach(model, first), torch.no_grad():
        model(x[:4])
        state = first.state_dict()
        assert plain(state["measured"])
        kept = copy.deepcopy(state)
        model(x[4:8])
        model(x[8:])
    assert same(state, kept)  # what comes later does not move it
    for probe in (second, third):
        probe.load_state_dict(state)
    run_probes(model, x, [second], skip=4, **run)
    assert_equal(second.result(), whole.result())
    assert same(state, kept)
    run_probes(model, x, [third], skip=4, **run)  # two probes of one state share nothing
    assert_equal(third.result(), whole.result())
    second.load_state_dict(empty)
    run_probes(model, x, [second], **run)
    assert_equal(second.result(), whole.result())


def merging_in_any_order_is_the_same(model, x, make):
    """Rows of sequences come in the order of merging; everything else is the same."""
    parts = [make(x) for _ in range(3)]
    for place, probe in enumerate(parts):
        with attach(model, probe, first_index=4 * place), torch.no_grad():
            model(x[4 * place : 4 * place + 4])
    forward, backward = make(x), make(x)
    for probe in copy.deepcopy(parts):
        forward.merge(probe)
    for probe in copy.deepcopy(parts[::-1]):
        backward.merge(probe)
    order = torch.arange(N).view(3, 4).flip(0).flatten()
    one, other = numbers(forward.result()), numbers(backward.result())
    for name, value in other.items():
        if name.startswith(("weight", "bias")):  # maps of few rows amplify rounding; errors do not
            continue
        axis = next((i for i, size in enumerate(value.shape) if size == N), None)
        # a table of sequences is in their order, whoever comes first
        if axis is not None and "sequences.0" not in other:
            value = value.index_select(axis, order)
        torch.testing.assert_close(one[name], value, rtol=1e-5, atol=1e-8, equal_nan=True, msg=name)


def its_tables_and_pictures_are_those_of_the_saved_one(model, x, make):
    (result,) = run_probes(model, x, [make(x)], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        result.save(f"{folder}/result")
        loaded = Result.load(f"{folder}/result")
    assert_equal(loaded, result)
    assert len(result.to_frame())
    assert loaded.to_frame().equals(result.to_frame())
    assert len(loaded.array().plot().axes)
    assert "<table" in loaded._repr_html_()


def each_number_stands_in_a_row_of_the_table_of_its_array(model, x, make):
    (result,) = run_probes(model, x, [make(x)], progress=False)
    for name, array in result.arrays.items():
        frame = array.to_frame()
        parts = array.values if isinstance(array.values, tuple) else (array.values,)
        assert len(frame) == sum(part.numel() for part in parts)
        for row in frame.sample(min(len(frame), 9), random_state=0).to_dict("records"):
            value = array.select(**{dim: row[dim] for dim in array.dims}).values
            assert float(value) == pytest.approx(float(row[name]), nan_ok=True)


def the_default_number_type_changes_nothing(model, x, make):
    """torch.set_default_dtype(float64) is of the user, and says nothing of this model."""
    (expected,) = run_probes(model, x, [make(x)], progress=False)
    torch.set_default_dtype(torch.float64)
    try:
        (found,) = run_probes(model, x, [make(x)], progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(found, expected, 1e-6)


PROPERTIES = (
    the_model_is_left_as_found,
    the_model_is_left_as_found_after_an_exception,
    blocks_end_in_any_order,
    batches_and_their_order_do_not_matter,
    settling_changes_no_result,
    padding_on_either_side_does_not_matter,
    going_on_from_a_snapshot_equals_not_having_stopped,
    merging_in_any_order_is_the_same,
    its_tables_and_pictures_are_those_of_the_saved_one,
    each_number_stands_in_a_row_of_the_table_of_its_array,
    the_default_number_type_changes_nothing,
)


def latin_square():
    """Each property of each probe on one model; each probe meets every model.

    Of a probe with two settings always one with each property, in turn.
    """
    for first, holds in enumerate(PROPERTIES):
        for second, probe in enumerate(EVERY):
            kind, number = probe.split()
            several = f"{kind} 1" in EVERY and (first + int(number)) % 2
            marks = pytest.mark.slow if several else ()
            yield holds, probe, list(MODELS)[(first + second) % len(MODELS)], marks


@pytest.mark.parametrize(
    ("holds", "probe", "name"),
    [
        pytest.param(*each, id=f"{each[0].__name__}, {each[1]}, {each[2]}", marks=marks)
        for *each, marks in latin_square()
    ],
)
def test_what_holds_for_every_probe(holds, probe, name, case_of):
    if is_refused(probe, name):
        with pytest.raises(InfoFlowError, match="do not reach the output of this bridge"):
            holds(*case_of(name), EVERY[probe])
        return
    holds(*case_of(name), EVERY[probe])


@pytest.mark.parametrize(("holds", "name"), some_of(list(product(PROPERTIES, MODELS))))
def test_what_holds_for_every_probe_on_every_model(holds, name, case_of):
    for probe, make in EVERY.items():
        if not is_refused(probe, name):
            holds(*case_of(name), make)


def is_refused(probe, name):
    """Whether a bridge discards what this probe edits."""
    return name in ("bridge, gpt_neo", "bridge, bert", "bridge, opt") and probe.split()[0] in (
        "HeadIdeals",
        "AllHeads",
        "EditsOfPass",
    )


CHANGES = ("step", "data", "load_state_dict", "double", "new parameter", "new module")
OF_WEIGHTS = ("hosted, vector tokens", "bridge, gpt2", "token ids"), CHANGES, (PositionsProbe,)
OF_PROBES = [("token ids", CHANGES[i % len(CHANGES)], kind) for i, kind in enumerate(MAKES) if i]


@pytest.mark.parametrize(
    ("name", "by", "kind"),
    some_of([*product(*OF_WEIGHTS), *OF_PROBES], *spread(*OF_WEIGHTS), *OF_PROBES),
)
def test_changed_weights_are_refused(name, by, kind):
    build, data = MODELS[name]
    model, x = build().eval(), data()
    probe = MAKES[kind][0](x)
    weight = next(p for n, p in model.named_parameters() if "W_Q" in n or p.ndim > 1)
    with torch.no_grad(), attach(model, probe):
        model(x)
        if by == "step":
            weight.add_(0.5)
        elif by == "data":
            weight.data += 0.5
        elif by == "load_state_dict":
            model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})
        elif by == "double":
            model.double()
            x = x.double() if x.is_floating_point() else x
        else:
            owner = next(
                m for m in model.modules() if any(p is weight for p in m._parameters.values())
            )
            key = next(k for k, p in owner._parameters.items() if p is weight)
            if by == "new module":  # the one before is still there, as an ablation keeps it
                before, owner = owner, copy.deepcopy(owner)
                for parent in list(model.modules()):
                    for place in [k for k, m in parent._modules.items() if m is before]:
                        parent._modules[place] = owner
            setattr(owner, key, torch.nn.Parameter(weight * 2))
        if by == "data":
            model(x)
        else:
            with pytest.raises(InfoFlowError, match="weights changed between two passes"):
                model(x)
    if by == "data":
        with pytest.raises(InfoFlowError, match=r"written through parameter\.data"):
            probe.result()
    else:
        assert probe.n_sequences == N


def test_nothing_is_kept_alive(token_model):
    """A model that is no longer used is forgotten, with its activations."""
    x, gone, kept = token_ids(), {}, []
    for name, make in EVERY.items():
        clone, probes, hooks = copy.deepcopy(token_model), [make(x) for _ in range(2)], None
        with attach(clone, probes[0]) as handle:
            clone(x)
        if len(gone) % 2:  # the other entrances, in turn
            run_probes(clone, x, probes[1:], progress=False)
        else:
            with torch.no_grad():
                hooks = probes[1].fwd_hooks(clone)
                clone.run_with_hooks(x, fwd_hooks=hooks)
        kept += [handle, *probes, *(probe.result() for probe in probes)]
        gone[name] = [weakref.ref(each) for each in (clone, *clone.parameters())]
        del clone, hooks
    gc.collect()
    assert not [name for name, parts in gone.items() if any(part() is not None for part in parts)]
    assert all(
        len(result.record.model_fingerprint) == 16 for result in kept if isinstance(result, Result)
    )
