"""What users have is read as sequences, and padding changes nothing."""

import datasets
import pytest
import torch
import transformers

from infoflow_lens import (
    AttendedProbe,
    InfoFlowError,
    InfoFlowWarning,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    attach,
    load_any,
    run_probes,
)
from infoflow_lens.hooks.model.inputs import read_inputs
from tests.conftest import make_model_without_masks, make_token_model
from tests.reference import zoo
from tests.versions import for_each, needs_hooked_transformer, needs_version_4

LENGTHS = (9, 4, 6, 1, 9, 2)


def make_sequences():
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(17, (n,), generator=generator) for n in LENGTHS]


def padded(sequences, side, fill=0):
    longest = max(map(len, sequences))
    ids = torch.full((len(sequences), longest), fill)
    mask = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        place = slice(0, len(sequence)) if side == "right" else slice(longest - len(sequence), None)
        ids[row, place], mask[row, place] = sequence, 1
    return ids, mask


def alone(model, sequences, make):
    """The results of every sequence on its own."""
    return [run_probes(model, s[None], [make()], progress=False)[0] for s in sequences]


ARCHITECTURES = [
    {},
    {"positional_embedding_type": "rotary", "d_head": 6},
    {"positional_embedding_type": "alibi"},
    {"n_key_value_heads": 2},
    {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 3},
    {"use_attention_sinks": True},
    {"attn_only": True},
    {"parallel_attn_mlp": True},
]
NATIVE = [pytest.param({"attention_dir": "bidirectional"}, marks=needs_version_4)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("changes", for_each((kind,) for kind in ARCHITECTURES) + NATIVE)
def test_padding_on_either_side_changes_nothing(changes, side):
    model, sequences = make_token_model(**changes), make_sequences()
    ids, mask = padded(sequences, side)

    def make():
        return PositionsProbe((1, 3), spread=True)

    with attach(model, make(), AttendedProbe()) as probes:
        model(ids, attention_mask=mask)
    whole, attended = probes.results()
    (read,) = run_probes(model, ids, [make()], attention_mask=mask, batch_size=4, progress=False)
    assert whole.lengths.tolist() == list(LENGTHS) == read.lengths.tolist()
    single = alone(model, sequences, lambda: PositionsProbe((1,), spread=True))
    for index, n in enumerate(LENGTHS):
        (keys,) = run_probes(model, sequences[index][None], [AttendedProbe()], progress=False)
        for layer in range(2):
            for found in (whole, read):
                assert found.positions[layer][index, :, :n, 0].equal(
                    single[index].positions[layer][0, :, :, 0]
                )
                assert (found.positions[layer][index, :, n:] == -1).all()
                torch.testing.assert_close(
                    found.entropy[layer][index, :, :n],
                    single[index].entropy[layer][0],
                    atol=1e-5,
                    rtol=0,
                )
            assert attended.attended[layer][index, :, :n, :n].equal(keys.attended[layer][0])
            assert attended.attended[layer][index].sum() == keys.attended[layer][0].sum()


@pytest.mark.parametrize("side", ["left", "right"])
def test_recovery_of_padded_batches_equals_single_sequences(side):
    model = make_token_model().double()
    sequences = make_sequences() * 4
    ids, mask = padded(sequences, side)
    (whole,) = run_probes(model, ids, [RecoveryProbe()], attention_mask=mask, progress=False)
    (single,) = run_probes(model, sequences, [RecoveryProbe()], batch_size=1, progress=False)
    with attach(model, RecoveryProbe()) as probes:
        model(ids, attention_mask=mask)
    for found in (whole, probes[0].result()):
        assert found.n_fit == single.n_fit
        for one, other in zip(found.fvu, single.fvu, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "make",
    [
        make_model_without_masks,
        pytest.param(
            lambda: make_token_model(attention_dir="bidirectional"), marks=needs_hooked_transformer
        ),
    ],
)
def test_a_model_that_ignores_the_mask_is_refused(make):
    model = make()
    ids, mask = padded(make_sequences(), "left")
    with attach(model, PositionsProbe()), pytest.raises(InfoFlowError, match="attend to padding"):
        model(ids, attention_mask=mask)


def test_where_nothing_may_be_padded_lengths_run_apart():
    model, sequences = make_token_model(attention_dir="bidirectional"), make_sequences()
    (found,) = run_probes(model, sequences, [PositionsProbe()], progress=False)
    for index, result in enumerate(alone(model, sequences, PositionsProbe)):
        n = LENGTHS[index]
        assert found.positions[1][index, :, :n].equal(result.positions[1][0])


def as_dataset(sequences, with_mask):
    ids, mask = padded(sequences, "left")
    rows = {"input_ids": ids.tolist()} | ({"attention_mask": mask.tolist()} if with_mask else {})
    return datasets.Dataset.from_dict(rows)


def loader(sequences):
    ids, mask = padded(sequences, "left")
    rows = [{"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask)]
    return torch.utils.data.DataLoader(rows, batch_size=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: s,
        lambda s: [row.tolist() for row in s],
        lambda s: dict(zip(("input_ids", "attention_mask"), padded(s, "right"))),
        lambda s: as_dataset(s, with_mask=True),
        lambda s: as_dataset(s, with_mask=True).with_format("torch"),
        lambda s: datasets.Dataset.from_dict({"tokens": [row.tolist() for row in s]}),
        loader,
    ],
)
def test_all_kinds_of_inputs_are_the_same_sequences(token_model, make):
    sequences = make_sequences()
    (expected,) = run_probes(token_model, sequences, [PositionsProbe()], progress=False)
    (found,) = run_probes(token_model, make(sequences), [PositionsProbe()], progress=False)
    for one, other in zip(found.positions, expected.positions, strict=True):
        assert one.equal(other)
    assert read_inputs(token_model, make(sequences)).n_sequences == 6


def test_vector_tokens_come_from_datasets_and_loaders(model, inputs):
    (expected,) = run_probes(model, inputs, [PositionsProbe()], progress=False)
    table = datasets.Dataset.from_dict({"x": inputs.tolist(), "y": [0] * 23})
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, torch.zeros(23)), batch_size=5
    )
    for given in (table, batches, iter(inputs.split(4))):
        (found,) = run_probes(model, given, [PositionsProbe()], progress=False)
        assert found.positions[1].equal(expected.positions[1])


def test_resuming_skips_what_was_seen(token_model):
    sequences = make_sequences()
    (expected,) = run_probes(token_model, sequences, [PositionsProbe()], progress=False)
    for given in (sequences, loader(sequences)):
        probe, done = PositionsProbe(), []
        run_probes(token_model, sequences[:3], [probe], progress=False, after_batch=done.append)
        assert sum(done) == 3
        (found,) = run_probes(token_model, given, [probe], skip=3, progress=False)
        assert found.positions[0].equal(expected.positions[0])


def test_sequences_may_be_cut(token_model):
    (found,) = run_probes(
        token_model, make_sequences(), [PositionsProbe()], max_length=4, progress=False
    )
    assert found.lengths.tolist() == [min(n, 4) for n in LENGTHS]


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ([], {}, "inputs is empty"),
        (["a text"], {}, r"inputs\[0\] is a text, but the model has no tokenizer"),
        ([[1, 2], []], {}, r"inputs\[1\] has shape \(1, 0\)"),
        ([[1, 2], [1.5, 2]], {}, r"inputs\[1\] is"),
        ([[1, 2, 99]], {}, "token ids from 1 to 99"),
        ([list(range(10))], {}, "sequences of 10 tokens, the model takes at most n_ctx 9"),
        ([[1, 2]], {"max_length": 0}, "max_length is 0"),
        ({"a": 1}, {}, "inputs has the columns a"),
        (7, {}, "inputs is int"),
        (
            datasets.Dataset.from_dict({"words": ["a"]}),
            {},
            "inputs has the columns words, without input_ids or tokens or text or x",
        ),
        (datasets.Dataset.from_dict({"text": ["a"]}), {"column": "ids"}, "without ids"),
        (
            torch.ones(2, 3).long(),
            {"attention_mask": torch.ones(2, 2)},
            r"\[\[2\], \[2\]\], the ids \[\[3\], \[3\]\]",
        ),
        (
            torch.ones(2, 3).long(),
            {"attention_mask": torch.zeros(2, 3)},
            "expected one stretch of at least one",
        ),
        (
            torch.ones(2, 3).long(),
            {"attention_mask": torch.ones(1, 3)},
            r"shapes \[\[3\]\], the ids",
        ),
    ],
)
def test_bad_inputs_are_named(token_model, given, arguments, message):
    with pytest.raises(InfoFlowError, match=message):
        run_probes(token_model, given, [PositionsProbe()], progress=False, **arguments)


def test_a_batch_too_large_for_memory_is_halved_once(token_model, token_inputs, monkeypatch):
    """A pass with more than 6 sequences fails, in the model or while a probe takes it in."""
    (expected,) = run_probes(token_model, token_inputs, [PositionsProbe()], progress=False)

    def check_size(n):
        if n > 6:
            raise torch.OutOfMemoryError("no memory")

    def in_the_model(activation, hook):
        check_size(len(activation))

    for fails_in_probe in (False, True):
        first, second = PositionsProbe(), PositionsProbe()
        hooks = [] if fails_in_probe else [("blocks.1.hook_resid_pre", in_the_model)]
        with monkeypatch.context() as patch, token_model.hooks(fwd_hooks=hooks):
            if fails_in_probe:

                def limited(*args, update=second.update):
                    check_size(len(args[-1].held_out))
                    return update(*args)

                patch.setattr(second, "update", limited)
            with pytest.warns(InfoFlowWarning, match="batch of 12 sequences: going on with half"):
                results = run_probes(
                    token_model, token_inputs, [first, second], batch_size=12, progress=False
                )
            for result in results:
                assert result.positions[1].equal(expected.positions[1])
            with (
                pytest.warns(InfoFlowWarning),
                pytest.raises(InfoFlowError, match="smaller batch_size"),
            ):
                run_probes(
                    token_model, token_inputs, [PositionsProbe(), second], batch_size=19,
                    progress=False,
                )  # fmt: skip


@pytest.fixture(scope="module", params=["bridge", "token model"])
def reader(request, tmp_path_factory):
    """A model with a tokenizer: one token for each word, and BOS in front."""
    folder = tmp_path_factory.mktemp("gpt2")
    zoo.save("gpt2", folder)
    if request.param == "bridge":
        return load_any(str(folder)).model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return make_token_model(tokenizer, d_vocab=zoo.N_VOCAB, n_ctx=zoo.N_CTX)


TEXTS = ["w5 w6 w7 w8", "w9 w10", "w11 w12 w13 w14 w15 w16"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_tokenised_once_and_padding_is_dropped(reader, side, monkeypatch):
    monkeypatch.setattr(reader.tokenizer, "padding_side", side)
    ids = [[2, *(int(word[1:]) for word in text.split())] for text in TEXTS]  # 2 is BOS
    (expected,) = run_probes(reader, ids, [PositionsProbe()], progress=False)
    assert expected.lengths.tolist() == [5, 3, 7]
    table = datasets.Dataset.from_dict({"text": TEXTS})
    batches = torch.utils.data.DataLoader(TEXTS, batch_size=2)
    for given in (TEXTS, table, batches):
        (found,) = run_probes(reader, given, [PositionsProbe()], batch_size=2, progress=False)
        assert all(a.equal(b) for a, b in zip(found.positions, expected.positions, strict=True))
    (single,) = run_probes(reader, TEXTS[1], [PositionsProbe()], progress=False)
    assert single.positions[1][0].equal(expected.positions[1][1, :, :3])


def test_texts_in_the_users_own_call_are_understood(reader):
    (expected,) = run_probes(reader, TEXTS, [PositionsProbe()], progress=False)
    with attach(reader, PositionsProbe()) as probes:
        reader(TEXTS)
        reader(TEXTS[0])
    (found,) = probes.results()
    assert found.lengths.tolist() == [5, 3, 7, 5]
    for one, other in zip(found.positions, expected.positions, strict=True):
        assert one[:3].equal(other)
        assert one[3].equal(other[0])


@pytest.mark.parametrize("given", ["", ["w5", ""]])
def test_an_empty_text_is_named(reader, given):
    with pytest.raises(InfoFlowError, match=r"inputs\[.\] is ''"):
        run_probes(reader, given, [PositionsProbe()], progress=False)


def test_leading_padding_that_a_model_masks_unasked_is_refused(reader, monkeypatch):
    """A HookedTransformer whose tokenizer pads on the left makes a mask of its own."""
    monkeypatch.setattr(reader.tokenizer, "padding_side", "left")
    ids = torch.tensor([[0, 0, 2, 5, 6], [2, 5, 6, 7, 8]])
    with attach(reader, PositionsProbe()) as probes:
        if hasattr(type(reader), "boot_transformers"):
            reader(ids)  # a bridge attends to it: then it is a token like others
            assert probes.results()[0].lengths.tolist() == [5, 5]
        else:
            with pytest.raises(InfoFlowError, match="starts with 2 pad tokens"):
                reader(ids)


def test_one_token_is_a_sequence(token_model):
    ids = torch.randint(17, (20, 1), generator=torch.Generator().manual_seed(0))
    probes = [PositionsProbe(spread=True), AttendedProbe(), JacobianInfluence()]
    positions, attended, influence = run_probes(token_model, ids, probes, progress=False)
    assert (positions.argmax[0] == 0).all()
    assert (positions.entropy[0] == 0).all()
    assert attended.attended[0].all()
    assert (influence.influence > 0).all()
    with pytest.raises(InfoFlowError, match="rank 2 is beyond the number of keys"):
        run_probes(token_model, ids, [PositionsProbe((2,))], progress=False)


def test_a_model_on_several_devices_is_refused(token_model, token_inputs):
    token_model.unembed.to("meta")
    with pytest.raises(InfoFlowError, match="several devices: cpu, meta"):
        run_probes(token_model, token_inputs, [PositionsProbe()], progress=False)


def test_positions_left_out_are_never_chosen(token_model, token_inputs):
    (found,) = run_probes(
        token_model, token_inputs, [PositionsProbe((1, 2), without=(0, 3))], progress=False
    )
    (plain,) = run_probes(token_model, token_inputs, [PositionsProbe((1, 2, 3))], progress=False)
    for chosen, ranked in zip(found.positions, plain.positions, strict=True):
        assert not torch.isin(chosen, torch.tensor([0, 3])).any()
        assert (chosen[:, :, 0] == -1).all()  # position 0 sees itself alone
        first = ranked[..., 0]
        kept = (first != 0) & (first != 3)
        assert chosen[..., 0][kept].equal(first[kept])


def test_loaders_of_rows_are_not_read_transposed(token_model, token_inputs):
    """torch collates rows that are lists into one tensor for each position."""
    table = datasets.Dataset.from_dict({"input_ids": token_inputs.tolist()})
    with pytest.raises(InfoFlowError, match=r"one for each position.*with_format\('torch'\)"):
        run_probes(
            token_model,
            torch.utils.data.DataLoader(table, batch_size=6),
            [PositionsProbe()],
            progress=False,
        )
    loader = torch.utils.data.DataLoader(table.with_format("torch"), batch_size=6)
    (found,) = run_probes(token_model, loader, [PositionsProbe()], progress=False)
    assert found.lengths.tolist() == [9] * 19


def test_targets_beside_ids_are_no_mask(token_model):
    """Also targets of 0 and 1, as in parity, tagging and binary classes."""
    ids, _ = padded(make_sequences(), "left")
    generator = torch.Generator().manual_seed(0)
    tags = torch.randint(2, ids.shape, generator=generator)
    tags[:, ::2] = 1 - tags[:, 1:2]  # no stretch
    classes = torch.randint(2, (len(ids),), generator=generator)
    together = torch.utils.data.TensorDataset
    for second in (ids, tags, classes, torch.ones_like(ids)):
        loader = torch.utils.data.DataLoader(together(ids, second), batch_size=4)
        for given in ((ids, second), loader):
            (found,) = run_probes(token_model, given, [PositionsProbe()], progress=False)
            assert found.lengths.tolist() == [9] * 6


def test_what_may_be_a_mask_must_be_named(token_model):
    ids, mask = padded(make_sequences(), "left")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, mask), batch_size=4)
    for given in ((ids, mask), loader):
        with pytest.raises(InfoFlowError, match="expected a mask to be named"):
            run_probes(token_model, given, [PositionsProbe()], progress=False)
    named = {"input_ids": ids, "attention_mask": mask}
    (found,) = run_probes(token_model, named, [PositionsProbe()], progress=False)
    assert found.lengths.tolist() == list(LENGTHS)


def test_arrays_and_small_integers_are_read(token_model, token_inputs):
    (expected,) = run_probes(token_model, token_inputs, [PositionsProbe()], progress=False)
    for given in (
        token_inputs.numpy(),
        list(token_inputs.numpy()),
        token_inputs.to(torch.uint8),
        token_inputs.to(torch.int32),
    ):
        (found,) = run_probes(token_model, given, [PositionsProbe()], progress=False)
        assert found.positions[1].equal(expected.positions[1])


def test_a_generator_of_rows_is_refused(token_model, token_inputs):
    rows = (row.tolist() for row in token_inputs)
    with pytest.raises(InfoFlowError, match="gave list of int: expected batches"):
        run_probes(token_model, rows, [PositionsProbe()], progress=False)


def test_a_column_of_numbers_is_refused(token_model):
    table = datasets.Dataset.from_dict({"label": [1, 2, 3]})
    with pytest.raises(InfoFlowError, match="'label' of inputs holds int"):
        run_probes(token_model, table, [PositionsProbe()], column="label", progress=False)


def test_streamed_datasets_and_mappings_are_read(token_model):
    sequences = make_sequences()
    rows = datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in sequences]})
    (expected,) = run_probes(token_model, sequences, [PositionsProbe()], progress=False)
    ids, mask = padded(sequences, "left")
    for given in (
        rows.to_iterable_dataset(),
        {"input_ids": ids, "attention_mask": mask},
    ):
        (found,) = run_probes(token_model, given, [PositionsProbe()], batch_size=4, progress=False)
        assert found.positions[1].equal(expected.positions[1])
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    with pytest.raises(InfoFlowError, match=r"with train, test: expected one split"):
        run_probes(token_model, splits, [PositionsProbe()], progress=False)
    with pytest.raises(InfoFlowError, match="skip is -1"):
        run_probes(token_model, rows, [PositionsProbe()], skip=-1, progress=False)


def test_of_a_long_text_no_more_is_tokenised_than_is_kept(tmp_path, monkeypatch):
    """Tokenizers take hundreds of bytes a character: 25 MB of one line once took 4.4 GB."""
    model = load_any(zoo.save("gpt2", tmp_path)).model
    tokenizer = type(model).to_tokens
    seen = []

    def watched(self, text, *args, **kwargs):
        seen.append(len(text))
        return tokenizer(self, text, *args, **kwargs)

    text = "w5 w6 w7 " * 1_000_000
    short = read_inputs(model, [text[:9000]], max_length=16).sequences()
    monkeypatch.setattr(type(model), "to_tokens", watched)
    found = read_inputs(model, [text], max_length=16).sequences()
    assert found.equal(short)
    assert max(seen) < 2**17
