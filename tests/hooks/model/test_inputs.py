"""What users have is read as sequences, and padding changes nothing."""

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from infoflow_lens import (
    InfoFlowError,
    InfoFlowWarning,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    attach,
    load_any,
    open_model,
    run_probes,
)
from infoflow_lens.hooks import AttendedProbe
from infoflow_lens.hooks.model.inputs import accepts_padding, read_inputs, read_one
from tests.conftest import make_model_without_masks, make_token_model, some_of
from tests.hooks.test_invariants import assert_equal, hosted_over_ids
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


@pytest.fixture(scope="module")
def shared_model():
    """A model that is asked what it reads, and changed by nothing."""
    return make_token_model()


def rows_of(model, given, batch_size=4, skip=0, **arguments):
    """The sequences that batches of inputs hold, without padding, as lists."""
    read = read_inputs(model, given, **arguments)
    return [
        row[real].tolist()
        for batch in read.batches(batch_size, skip)
        for row, real in zip(batch.tokens, batch.mask(), strict=True)
    ]


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


@pytest.mark.parametrize("changes", for_each((kind,) for kind in ARCHITECTURES) + NATIVE)
def test_padding_on_either_side_changes_nothing(changes):
    check_padding(make_token_model(**changes), "left" if len(changes) % 2 else "right")


@pytest.mark.parametrize("side", some_of(["left", "right"], "left"))
def test_padding_of_hosted_models_changes_nothing(side):
    check_padding(hosted_over_ids(), side)


def check_padding(model, side):
    model, sequences = model.double(), make_sequences() * 4
    ids, mask = padded(sequences, side)

    def make():
        recovery = RecoveryProbe(controls=("random",))
        return [PositionsProbe((1,), spread=True), AttendedProbe(), recovery]

    with attach(model, *make()) as probes:
        model(ids, attention_mask=mask)
    read = run_probes(model, ids, make(), attention_mask=mask, batch_size=4, progress=False)
    alone = run_probes(model, sequences, make(), batch_size=1, progress=False)
    for found in (probes.results(), read):
        assert found[0].lengths.tolist() == list(LENGTHS) * 4
        for one, other in zip(found, alone, strict=True):
            assert_equal(one, other, tolerance=1e-5)


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
    (alone,) = run_probes(model, sequences, [PositionsProbe()], batch_size=1, progress=False)
    assert_equal(found, alone, tolerance=1e-5)
    if not accepts_padding(model):  # a native bridge reads the mask
        batches = read_inputs(model, sequences).batches(4)
        assert [tuple(batch.tokens.shape) for batch in batches] == [(1, n) for n in LENGTHS]


def as_lists(sequences):
    return [row.tolist() for row in sequences]


def named(sequences, side="left"):
    return dict(zip(("input_ids", "attention_mask"), padded(sequences, side)))


def table_of(sequences):
    return datasets.Dataset.from_dict({k: v.tolist() for k, v in named(sequences).items()})


def loader_of(sequences, **settings):
    rows = [{"input_ids": i, "attention_mask": m} for i, m in zip(*padded(sequences, "left"))]
    return torch.utils.data.DataLoader(rows, **settings)


KINDS = {
    "list of tensors": lambda s: s,
    "list of lists": as_lists,
    "list of arrays": lambda s: [row.numpy() for row in s],
    "list of small integers": lambda s: [row.to(torch.uint8) for row in s],
    "mapping": lambda s: named(s, "right"),
    "mapping of arrays": lambda s: {name: part.numpy() for name, part in named(s).items()},
    "dataset": table_of,
    "dataset of tensors": lambda s: table_of(s).with_format("torch"),
    "dataset of batches": lambda s: table_of(s).batch(4),
    "streamed dataset of batches": lambda s: table_of(s).to_iterable_dataset().batch(4),
    "another column": lambda s: datasets.Dataset.from_dict({"tokens": as_lists(s)}),
    "streamed dataset": lambda s: table_of(s).to_iterable_dataset(),
    "list of mappings": lambda s: [{"input_ids": row, "labels": 0} for row in as_lists(s)],
    "loader": lambda s: loader_of(s, batch_size=4),
    "loader of rows": lambda s: loader_of(s, batch_size=None),
    "loader of lists": lambda s: torch.utils.data.DataLoader(
        s, batch_size=4, collate_fn=lambda rows: rows
    ),
    "generator of any of them": lambda s: iter(
        [s[:2], named(s[2:3]), {"input_ids": s[3]}, {"input_ids": s[4].tolist()}, table_of(s[5:])]
    ),
}


UNCOUNTED = {
    "streamed dataset",
    "streamed dataset of batches",
    "list of mappings",
    "generator of any of them",
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_inputs_are_the_same_sequences(shared_model, kind):
    make, sequences = KINDS[kind], make_sequences()
    assert rows_of(shared_model, make(sequences)) == as_lists(sequences)
    cut = rows_of(shared_model, make(sequences), skip=3, max_length=4)
    assert cut == [row[:4] for row in as_lists(sequences)[3:]]
    known = read_inputs(shared_model, make(sequences)).n_sequences
    assert known == 6 or (known is None and kind in UNCOUNTED)


def test_one_mapping_may_be_one_row(token_model):
    row = {"input_ids": [0, 3, 4], "attention_mask": [0, 1, 1]}
    assert rows_of(token_model, row) == [[3, 4]]
    assert rows_of(token_model, {"input_ids": torch.tensor([3, 4])}) == [[3, 4]]


def test_vector_tokens_come_from_datasets_and_loaders(model, inputs):
    table = datasets.Dataset.from_dict({"x": inputs.tolist(), "y": [0] * 23})
    pairs = torch.utils.data.TensorDataset(inputs, torch.zeros(23))
    batches = torch.utils.data.DataLoader(pairs, batch_size=5)
    for given in (inputs, inputs.numpy(), table, batches, iter(inputs.split(4))):
        assert rows_of(model, given) == inputs.tolist()


def test_resuming_skips_what_was_seen(token_model):
    sequences = make_sequences()
    (expected,) = run_probes(token_model, sequences, [PositionsProbe()], progress=False)
    probe, done = PositionsProbe(), []
    run_probes(token_model, sequences[:3], [probe], progress=False, after_batch=done.append)
    assert sum(done) == 3
    loader = loader_of(sequences, batch_size=2)
    (found,) = run_probes(token_model, loader, [probe], skip=3, progress=False)
    assert_equal(found, expected)
    with pytest.raises(InfoFlowError, match="skip is -1"):
        run_probes(token_model, sequences, [probe], skip=-1, progress=False)


ONES = torch.ones(2, 3).long()
TABLE = datasets.Dataset.from_dict(
    {"words": ["a", "b"], "input_ids": [[1, 2], [3, 4]], "label": [1, 2]}
)


def transposed():
    """torch collates rows that are lists into one tensor for each position."""
    return torch.utils.data.DataLoader(TABLE.select_columns("input_ids"), batch_size=2)


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ([], {}, "inputs is empty"),
        (["a text"], {}, r"inputs\[0\] is a text, but the model has no tokenizer"),
        ([[1, 2], []], {}, r"inputs\[1\] has shape \(1, 0\)"),
        ([[1, 2], [1.5, 2]], {}, r"inputs\[1\] is"),
        ([[1, 2], "a"], {}, r"inputs\[1\] is 'a'"),
        ([[1, 2, 99]], {}, "token ids from 1 to 99"),
        ([list(range(10))], {}, "has 10 tokens, the model takes at most n_ctx 9"),
        ([[1, 2]], {"max_length": 0}, "max_length is 0"),
        ([[1, 2]], {"max_length": 2.5}, "max_length is 2.5"),
        ([[1, 2]], {"column": 7}, "column is 7"),
        (7, {}, "inputs is int"),
        (b"ab", {}, "inputs is bytes"),
        (torch.tensor(3), {}, r"inputs is \(\)"),
        ({"a": 1}, {}, "inputs has the columns a"),
        ({"input_ids": 1}, {}, "inputs is dict"),
        (
            TABLE.select_columns("words"),
            {},
            r"words, without input_ids or tokens or text or x: .*column=.NAME.",
        ),
        (TABLE, {"column": "ids"}, "without ids"),
        (TABLE, {"column": "label"}, "'label' of inputs holds int"),
        (datasets.DatasetDict(train=TABLE, test=TABLE), {}, "with train, test: expected one split"),
        (transposed(), {}, r"one for each position.*with_format\('torch'\)"),
        ((row.tolist() for row in ONES), {}, "gave list of int: expected batches"),
        (iter([ONES]), {"attention_mask": ONES}, "is a loader, and an attention_mask"),
        (["a"], {"attention_mask": [[1]]}, "no tokenizer"),
        (ONES, {"attention_mask": 1}, "attention_mask of inputs is int"),
        (ONES, {"attention_mask": ONES[:1]}, r"shapes \[\[3\]\], the ids"),
        (ONES, {"attention_mask": ONES[:, :2]}, r"\[\[2\], \[2\]\], the ids \[\[3\], \[3\]\]"),
        (ONES, {"attention_mask": ["ab", "cd"]}, r"attention_mask of inputs\[0\] is 'ab'"),
        (ONES, {"attention_mask": 2 * ONES}, r"values such as \[2, 2, 2\]"),
        (ONES, {"attention_mask": 0 * ONES}, "expected one stretch of at least one"),
        (ONES, {"attention_mask": [[1, 1, 1], [1, 0, 1]]}, r"inputs\[1\].* at \[0, 2\]"),
        ([[1, 2], float("nan")], {}, r"inputs\[1\] is nan: expected a sequence"),
        (pd.DataFrame({"input_ids": [[1, 2], None]}), {}, r"inputs\[1\]"),
        (pd.DataFrame({"input_ids": [float("nan"), [1, 2]]}), {}, "'input_ids' .* float in row 0"),
        (pd.DataFrame([[1, 2]], columns=["input_ids"] * 2), {}, "several columns of one name"),
        (
            np.ma.masked_array([[1, 2], [3, 4]], [[0, 1], [0, 0]]),
            {},
            "an array with masked entries",
        ),
        ([np.ma.masked_array([1, 2], [0, 1])], {}, "an array with masked entries"),
    ],
)
def test_bad_inputs_are_named(shared_model, given, arguments, message):
    with pytest.raises(InfoFlowError, match=message):
        rows_of(shared_model, given, **arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "text is ''"),
        ([""], "text is ''"),
        (("", ""), r"text is \('', ''\)"),
        # of several each has its number
        (["", "w1"], r"text\[0\] is ''"),
        (["w1", ""], r"text\[1\] is ''"),
        # and what is quoted stays as it was given
        ([["a text[0]", "b"]], r"text is a list of texts, \['a text\[0\]', 'b'\]"),
    ],
)
def test_a_sequence_that_stands_alone_has_no_number(given, message):
    model = open_model(zoo.build("bert"), zoo.pair_tokenizer())
    with pytest.raises(InfoFlowError, match=f"^{message}"):
        read_one(model, given, "text")


IDS = zoo.tokens(4, 9)
UNUSUAL = {
    "meta": lambda: torch.zeros(4, 9, dtype=torch.long, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([IDS[0], IDS[1, :4]]),
    "jagged": lambda: torch.nested.nested_tensor([IDS[0], IDS[1, :4]], layout=torch.jagged),
    "sparse": lambda: IDS.to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(IDS.float(), 1.0, 0, torch.quint8),
    "float8": lambda: IDS.to(torch.float8_e4m3fn),
}


# PyTorch means to do without some of them
@pytest.mark.filterwarnings("ignore:torch.quantize_per|The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_of_unusual_kinds_are_named(token_model, model, kind):
    x = UNUSUAL[kind]()
    given = [x, {"input_ids": x}, [x, x], iter([x])]
    for tokens in given:
        with pytest.raises(InfoFlowError, match=r"is a tensor .*: expected ordinary numbers"):
            run_probes(token_model, tokens, [PositionsProbe()], progress=False)
    with pytest.raises(InfoFlowError, match=r"is a tensor .*: expected ordinary numbers"):
        run_probes(model, x, [PositionsProbe()], progress=False)
    with pytest.raises(InfoFlowError, match=r"is a tensor .*: expected ordinary numbers"):
        model(x)
    if kind not in ("nested", "jagged"):  # whose rows are ordinary, of other lengths
        with pytest.raises(InfoFlowError, match=r"is a tensor .*: expected ordinary numbers"):
            run_probes(token_model, IDS, [PositionsProbe()], attention_mask=x, progress=False)


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
        return zoo.bridge(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return make_token_model(tokenizer, d_vocab=zoo.N_VOCAB, n_ctx=zoo.N_CTX)


TEXTS = ["w5 w6 w7 w8", "w9 w10", "w11 w12 w13 w14 w15 w16"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_tokenised_once_and_padding_is_dropped(reader, side, monkeypatch):
    monkeypatch.setattr(reader.tokenizer, "padding_side", side)
    ids = [[2, *(int(word[1:]) for word in text.split())] for text in TEXTS]  # 2 is BOS
    table = datasets.Dataset.from_dict({"text": TEXTS})
    batches = torch.utils.data.DataLoader(TEXTS, batch_size=2)
    for given in (TEXTS, table, table.to_iterable_dataset(), batches, iter(TEXTS)):
        assert rows_of(reader, given, batch_size=2) == ids
    assert rows_of(reader, TEXTS[1]) == [ids[1]]
    with pytest.raises(InfoFlowError, match=r"inputs\[1\] is ''"):
        rows_of(reader, ["w5", ""])
    with pytest.raises(InfoFlowError, match="holds texts with an attention_mask"):
        rows_of(reader, TEXTS, attention_mask=[[1]] * 3)


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


def test_a_model_on_several_devices_is_refused(token_model, token_inputs):
    token_model.unembed.to("meta")
    with pytest.raises(InfoFlowError, match="several devices: cpu, meta"):
        run_probes(token_model, token_inputs, [PositionsProbe()], progress=False)


def pairs_of(ids, second):
    together = torch.utils.data.TensorDataset(ids, second)
    return (ids, second), torch.utils.data.DataLoader(together, batch_size=4)


def test_targets_beside_ids_are_no_mask(token_model):
    """Also targets of 0 and 1, as in parity, tagging and binary classes."""
    ids, mask = padded(make_sequences(), "left")
    generator = torch.Generator().manual_seed(0)
    tags = torch.randint(2, ids.shape, generator=generator)
    tags[:, ::2] = 1 - tags[:, 1:2]  # no stretch
    classes = torch.randint(2, (len(ids),), generator=generator)
    for second in (ids, tags, classes, torch.ones_like(ids)):
        for given in pairs_of(ids, second):
            assert rows_of(token_model, given) == ids.tolist()
    for given in (*pairs_of(ids, mask), [ids, mask], (ids.numpy(), mask.numpy())):
        with pytest.raises(InfoFlowError, match="expected a mask to be named"):
            rows_of(token_model, given)


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


def test_rows_of_a_stream_share_batches_and_batches_of_a_loader_stay(token_model):
    sequences = make_sequences()
    for name, sizes in {"streamed dataset": [4, 2], "loader of rows": [4, 2], "dataset": [4, 2],
                        "generator of any of them": [2, 1, 2, 1]}.items():  # fmt: skip
        read = read_inputs(token_model, KINDS[name](sequences))
        assert [len(batch) for batch in read.batches(4)] == sizes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_arrays_and_small_integers_are_read(token_model, token_inputs, dtype):
    for given in (token_inputs.to(dtype), token_inputs.to(dtype).numpy()):
        assert rows_of(token_model, given) == token_inputs.tolist()


@pytest.mark.parametrize(
    "as_given",
    [
        lambda x: x[:, ::-1].copy()[:, ::-1],
        lambda x: x.astype(">i8"),
        lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
        np.ma.masked_array,
    ],
)
def test_arrays_in_any_order_of_memory_are_read(token_model, token_inputs, as_given):
    """Backwards, of other bytes, and not to be written: refused, or with a warning of PyTorch's."""
    x = token_inputs.numpy()
    assert rows_of(token_model, as_given(x)) == x.tolist()
    assert rows_of(token_model, list(as_given(x))) == x.tolist()


def test_an_empty_text_is_named(reader):
    for given, index in (("", 0), (["w5", ""], 1), (iter(["w5", ""]), 1)):
        with pytest.raises(InfoFlowError, match=rf"inputs\[{index}\] is ''"):
            rows_of(reader, given)


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


def test_texts_in_arrays_and_tables_are_those_of_a_list():
    model = load_any(zoo.build("gpt2"), tokenizer=zoo.tokenizer()).model
    texts = ["w5 w6 w7", "w8 w9"]
    expected = read_inputs(model, texts).sequences()
    frame = pd.DataFrame({"text": texts, "other": [1, 2]})
    ids = pd.DataFrame({"input_ids": [[5, 6, 7], [8, 9]]})
    plain = [torch.tensor(row) for row in ids["input_ids"]]
    for given, rows in (
        (np.array(texts), expected),
        (frame["text"], expected),
        (frame, expected),
        (ids, plain),
        (pd.Series([np.array(row) for row in ids["input_ids"]]), plain),
    ):
        found = read_inputs(model, given).sequences()
        assert all(mine.equal(theirs) for mine, theirs in zip(found, rows, strict=True))
