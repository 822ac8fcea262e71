"""Every entrance and every column that changes a pass: measured as it is, or refused by name.

The reference is the plain model of transformers, called with the same columns.
"""

import copy
import pickle
from itertools import product

import datasets
import pandas as pd
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from infoflow_lens import (
    InfoFlowError,
    InfoFlowWarning,
    JacobianInfluence,
    PositionsProbe,
    attach,
    flow,
    open_model,
    probe,
    run_probes,
    why,
)
from infoflow_lens.hooks import (
    LogitDifference,
    LogProbability,
    PatternsProbe,
    ResampleInfluence,
    measure_mechanisms,
    measure_shares,
)
from infoflow_lens.hooks.interventions.patterns import substituted
from infoflow_lens.hooks.model.inputs import Batch, Batches, read_inputs
from infoflow_lens.hooks.passes.run import run
from infoflow_lens.hooks.passes.view import Needs
from infoflow_lens.hooks.relations import find_heads
from infoflow_lens.probing.data import stream_data
from infoflow_lens.probing.shard import pack_rows
from infoflow_lens.probing.store import store_sequences
from tests.conftest import some_of, spread
from tests.reference import families, zoo
from tests.versions import needs_version_4

IDS = families.tokens()
TYPES = (torch.arange(14) % 7 > 3).long().reshape(2, 7)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
ONES = torch.ones(2, 7, dtype=torch.long)
KINDS = {
    "token_type_ids": ("bert", "eager", {"token_type_ids": TYPES}),
    "position_ids": ("bert", "sdpa", {"position_ids": PACKED}),
    "packed": ("llama", "sdpa", {"position_ids": PACKED}),
    "positions and mask": ("llama", "eager", {"position_ids": PACKED, "attention_mask": ONES}),
}


@pytest.fixture(scope="module")
def case():
    """A plain model, its opened one, the columns, and the patterns that the plain one has."""
    made = {}

    def build(name):
        if name not in made:
            kind, how, columns = KINDS[name]
            model, eager = families.build(kind, how), families.build(kind)
            for each in (model, eager):  # with a cache, transformers takes it for one document
                each.config.use_cache = False
            with torch.no_grad():
                expected = eager(IDS, **columns, output_attentions=True).attentions
                plain = eager(IDS, output_attentions=True).attentions
            assert max(float((a - b).abs().max()) for a, b in zip(expected, plain)) > 1e-3
            made[name] = open_model(model), {"input_ids": IDS, **columns}, expected
        return made[name]

    return build


def as_lists(given):
    return {name: values.tolist() for name, values in given.items()}


def rows_of(given):
    return [{name: values[i] for name, values in given.items()} for i in range(2)]


ENTRANCES = {
    "mapping": dict,
    "BatchEncoding": transformers.BatchEncoding,
    "lists": as_lists,
    "dataset": lambda given: datasets.Dataset.from_dict(as_lists(given)),
    "torch dataset": lambda given: datasets.Dataset.from_dict(as_lists(given)).with_format("torch"),
    "table": lambda given: pd.DataFrame(as_lists(given)),
    "loader of batches": lambda given: [dict(given)],
    "loader of rows": rows_of,
    "DataLoader": lambda given: torch.utils.data.DataLoader(rows_of(given), batch_size=2),
}


def patterns_of(model, given, **settings):
    (found,) = run_probes(model, given, [PatternsProbe()], progress=False, **settings)
    return found.patterns


@pytest.mark.parametrize(
    ("name", "entrance"),
    some_of(list(product(KINDS, ENTRANCES)), *spread([*KINDS], [*ENTRANCES])),
)
def test_columns_reach_the_model(case, name, entrance):
    model, given, expected = case(name)
    for batch_size in (1, 2):
        found = patterns_of(model, ENTRANCES[entrance](given), batch_size=batch_size)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["token_type_ids", "position_ids", "positions and mask"])
def test_padding_and_cuts_take_columns_along(case, name):
    """On either side, with sequences of two lengths, and cut to fewer tokens."""
    model, given, _ = case(name)
    alone = [
        patterns_of(model, {n: v[:1] for n, v in given.items()}),
        patterns_of(model, {n: v[1:, 3:] for n, v in given.items()}),
    ]
    mask = ONES.clone()
    mask[1, :3] = 0
    left = patterns_of(model, {**given, "attention_mask": mask})
    cut = patterns_of(model, given, max_length=4)
    for layer in range(2):
        torch.testing.assert_close(left[layer][0], alone[0][layer][0], rtol=0, atol=1e-5)
        torch.testing.assert_close(left[layer][1, :, :4, :4], alone[1][layer][0], rtol=0, atol=1e-5)
    short = patterns_of(model, {n: v[:, :4] for n, v in given.items()})
    assert all(torch.equal(one, other) for one, other in zip(cut, short, strict=True))


def jacobians(model, given):
    """The norms of the derivatives of each state of layer 1 by the state that enters block 0."""
    found = torch.zeros(2, 7, 7)
    entering = []

    def keep(module, args, kwargs):
        entering.append(args[0] if args else kwargs["hidden_states"])

    blocks = model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers
    handle = blocks[0].register_forward_pre_hook(keep, with_kwargs=True)
    parameter = next(model.parameters())
    parameter.requires_grad_(True)
    state = model(**given, output_hidden_states=True).hidden_states[1]
    handle.remove()
    for b in range(2):
        for t in range(7):
            rows = [
                torch.autograd.grad(state[b, t, i], entering[0], retain_graph=True)[0][b]
                for i in range(state.shape[-1])
            ]
            found[b, t] = torch.stack(rows).square().sum(dim=(0, 2)).sqrt()
    parameter.requires_grad_(False)
    return found


@pytest.mark.parametrize("name", ["token_type_ids", "packed"])
def test_influence_is_of_the_pass_with_columns(case, name):
    model, given, _ = case(name)
    probes = [JacobianInfluence(layers=(0,), state="resid_post"), PositionsProbe()]
    found, positions = run_probes(model, given, probes, progress=False)
    expected = jacobians(model.original_model, given)
    torch.testing.assert_close(found.full()[0], expected, rtol=1e-3, atol=1e-5)
    attached = [JacobianInfluence(layers=(0,), state="resid_post"), PositionsProbe()]
    with attach(model, *attached) as probes:
        model(**given)
    results = probes.results()
    torch.testing.assert_close(results[0].influence, found.influence)
    assert torch.equal(results[1].positions[0], positions.positions[0])


def test_mechanisms_are_of_the_pass_with_columns(case):
    """Each estimate and each decision, against a model that has the types in its embeddings."""
    model, given, _ = case("token_type_ids")
    same = families.build("bert")
    embeddings = same.bert.embeddings
    own = type(embeddings).forward
    types = {tuple(ids): row for ids, row in zip(IDS.tolist(), TYPES, strict=True)}

    def with_types(input_ids=None, token_type_ids=None, **kwargs):
        none = torch.zeros_like(input_ids[0])  # for other tokens, with which a model is opened
        rows = torch.stack([types.get(tuple(ids), none) for ids in input_ids.tolist()])
        return own(embeddings, input_ids, rows, **kwargs)

    embeddings.forward = with_types
    found = measure_mechanisms(model, given, progress=False)
    expected = measure_mechanisms(open_model(same), IDS, progress=False)
    assert found.to_frame().equals(expected.to_frame())
    plain = measure_mechanisms(model, IDS, progress=False)
    assert not found.to_frame().equals(plain.to_frame())


def test_zeros_are_no_types_where_the_model_takes_them_for_none():
    model = open_model(families.build("bert"))
    zeros = {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)}
    expected = patterns_of(model, IDS)
    found = patterns_of(model, zeros)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    measure_shares(model, {n: v[:1] for n, v in zeros.items()}, LogProbability(5))  # ids alone


# What cannot be measured with columns


@pytest.mark.parametrize("name", KINDS)
def test_what_stands_beside_a_token_stays_where_another_takes_its_place(case, name):
    """As by replacing tokens by hand in the plain model; columns were refused."""
    model, given, _ = case(name)
    columns = {key: values for key, values in given.items() if key != "input_ids"}
    donors = (families.tokens() + 40) % 97 + 3

    @torch.no_grad()
    def states(ids):
        shown = model.original_model(ids, **columns, output_hidden_states=True)
        return shown.hidden_states[1]

    plain, expected = states(IDS), torch.zeros(2, 7, 7)
    for donor in donors:
        for place in range(7):
            changed = IDS.clone()
            changed[:, place] = donor[place]
            expected[..., place] += (states(changed) - plain).norm(dim=-1) / len(donors)
    for batch_size in (1, 2):
        measure = ResampleInfluence(donors, "mean", state="resid_post")
        (found,) = run_probes(model, given, [measure], batch_size=batch_size, progress=False)
        torch.testing.assert_close(found.influence[0], expected, rtol=1e-4, atol=1e-5)


def test_other_tokens_are_asked_of_inputs_with_columns(case):
    """By `probe` and `flow`, which refused them."""
    model, given, _ = case("token_type_ids")
    settings = {"influence": "resample", "progress": False}
    for ask in (
        lambda text: probe(model, text, **settings),
        lambda text: flow(model, text, **settings),
    ):
        with_types, alone = ask(given).influence, ask({"input_ids": IDS}).influence
        assert with_types.record.config["donors"] == alone.record.config["donors"]
        gap = (with_types.influence - alone.influence).abs().max()
        assert float(gap) > 1e-3 * float(alone.influence.max())


def test_heads_are_found_on_pairs():
    """By the patterns of the plain model with the types; pairs were refused."""
    model = with_separators(zoo.build("bert"))
    found = find_heads(model, PAIRS, -1, progress=False)
    first = torch.zeros(len(found)).double()
    n_heads = len(found) // 2
    for pair in PAIRS:
        with torch.no_grad():
            made = model.tokenizer(*pair, return_tensors="pt")
            patterns = model.original_model(**made, output_attentions=True).attentions
        last = made["input_ids"].shape[1] - 1
        for layer, pattern in enumerate(patterns):
            hits = (pattern[0].argmax(-1) == last).double().sum(-1)
            first[layer * n_heads : (layer + 1) * n_heads] += hits
    rows = found.sort_values(["layer", "head"])
    assert (rows["share"] * rows["queries"]).tolist() == pytest.approx(first.tolist())


def test_shares_and_reasons_are_of_the_pass_with_columns(case):
    """The same as of a model whose word embeddings hold what the types add."""
    model, given, _ = case("token_type_ids")
    given = {name: values[:1] for name, values in given.items()}
    with torch.no_grad():
        logits = model.original_model(**given).logits[0, -1]
    found = measure_shares(model, given, LogitDifference(5, 6))
    assert found.value == pytest.approx(float(logits[5] - logits[6]), abs=1e-5)
    own = copy.deepcopy(model.original_model)
    types, words = (getattr(own.bert.embeddings, f"{n}_embeddings") for n in ("token_type", "word"))
    later = given["input_ids"][0, 4:]  # ids that stand at no earlier place
    assert not set(later.tolist()) & set(given["input_ids"][0, :4].tolist())
    decoder = own.cls.predictions.decoder
    decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone(), requires_grad=False)
    words.weight.data[later.unique()] += types.weight[1] - types.weight[0]
    same = measure_shares(open_model(own), given["input_ids"], LogitDifference(5, 6))
    assert found.value == pytest.approx(same.value, abs=1e-5)  # the embedding's own is another
    torch.testing.assert_close(found.values[1:], same.values[1:], rtol=1e-4, atol=1e-6)
    _, cache = model.run_with_cache(**given)
    row = cache["attn_scores", 1][0, 2, 6]
    reason = why(model, given, 1, 2)
    best = row.topk(2)
    assert reason.keys == tuple(best.indices.tolist())
    assert reason.margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-5)
    assert abs(reason.distance) < 1e-4
    assert flow(model, given, progress=False).reasons is not None


def save_rows(given, path):
    table = pd.DataFrame(as_lists(given))
    if path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, orient="records", lines=True)
    return str(path)


PLACES = ["rows.parquet", "rows.jsonl", "in memory"]


@pytest.mark.parametrize(
    ("name", "kind"), some_of(list(product(KINDS, PLACES)), *spread([*KINDS], PLACES)[::2])
)
def test_a_run_measures_the_pass_with_columns(case, name, kind, tmp_path):
    model, given, expected = case(name)
    data = given if kind == "in memory" else save_rows(given, tmp_path / kind)
    wanted = ("positions", "influence")
    found = probe(
        model, data, probes=wanted, influence="exact", shard=1, batch_size=1, progress=False
    ).found
    for one, other in zip(found["positions"].positions, expected, strict=True):
        assert one[..., 0].equal(other.argmax(dim=-1))
    (influence,) = run_probes(
        model, given, [JacobianInfluence("resid_post")], batch_size=1, progress=False
    )
    torch.testing.assert_close(found["influence"].influence, influence.influence)


def test_rows_may_begin_with_types_that_change_nothing(case, tmp_path, monkeypatch):
    """Files are read in parts, and a part of single texts has type 0 alone."""
    monkeypatch.setattr("infoflow_lens.probing.data._ROWS", 1)
    model, given, _ = case("token_type_ids")
    types = torch.stack([torch.zeros(7, dtype=torch.long), TYPES[1]])
    mixed = {**given, "token_type_ids": types}
    data = save_rows(mixed, tmp_path / "rows.jsonl")
    found = probe(model, data, tmp_path / "out", probes=("positions",), progress=False)
    with torch.no_grad():
        expected = model.original_model(**mixed, output_attentions=True).attentions
    for one, other in zip(found.found["positions"].positions, expected, strict=True):
        assert one[..., 0].equal(other.argmax(dim=-1))
    # other types are other data
    save_rows(given, tmp_path / "rows.jsonl")
    with pytest.raises(InfoFlowError, match="the data"):
        probe(model, data, tmp_path / "out", probes=("positions",), progress=False)
    # of all rows with type 0 the ids alone are measured, as they were before
    digests = []
    for columns in ({"token_type_ids": torch.zeros_like(IDS)}, {}):
        save_rows({"input_ids": IDS, **columns}, tmp_path / "rows.jsonl")
        parts = stream_data(model, data)
        digests.append(store_sequences(parts, tmp_path, "rows"))
        assert digests[-1].columns == ()
    assert digests[0].digest == digests[1].digest


@pytest.mark.parametrize("here", [True, False])
def test_workers_get_columns(case, tmp_path, here):
    model, given, _ = case("token_type_ids")
    parts = stream_data(model, save_rows(given, tmp_path / "rows.jsonl"))
    stored = store_sequences(parts, tmp_path, "rows").sequences
    sent = pickle.loads(pickle.dumps(pack_rows(Batches(model, stored).part(1, 2), here)))
    batches = Batches(model, sent) if here else sent.unpack(model)
    (batch,) = batches.batches(2)
    assert batch.tokens.equal(IDS[1:])
    assert batch.columns["token_type_ids"].equal(TYPES[1:])


WRONG = [
    ("bert", {"token_type_ids": TYPES[:, :5]}, "the token_type_ids of inputs has rows of shapes"),
    ("bert", {"inputs_embeds": torch.zeros(2, 7, 32)}, "the inputs_embeds of inputs has rows of"),
    ("bert", {"encoder_hidden_states": torch.zeros(2, 3, 32)}, "the encoder_hidden_states of inp"),
    ("llama", {"token_type_ids": TYPES}, "token_type_ids, which LlamaForCausalLM does not"),
    ("llama", {"attention_mask": torch.ones(2, 1, 7, 7)}, "with attention_mask inside attach"),
]


@pytest.mark.parametrize(("kind", "columns", "match"), WRONG)
def test_what_is_no_number_for_each_id_is_refused_by_name(kind, columns, match):
    model = open_model(families.build(kind))
    with pytest.raises(InfoFlowError, match=match):
        run_probes(model, {"input_ids": IDS, **columns}, [PatternsProbe()], progress=False)


def test_labels_and_columns_of_others_are_left_alone(case):
    model, given, expected = case("token_type_ids")
    more = {"labels": IDS, "special_tokens_mask": ONES, "score": torch.ones(2)}
    found = patterns_of(model, {**given, **more})
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@needs_version_4
def test_bridges_and_flows_take_columns(case, tmp_path):
    _, given, expected = case("token_type_ids")
    families.build("bert").save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    bridge = zoo.bridge(tmp_path)
    for one, other in zip(patterns_of(bridge, given), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    found = flow(families.build("bert"), given, influence=None, progress=False)
    for one, other in zip(found.attention.patterns, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


# Texts


def with_separators(model):
    return open_model(model, zoo.pair_tokenizer())


PAIRS = [("w5 w6", "w7 w8 w9"), ("w4", "w6")]


def test_pairs_of_texts_are_what_the_tokenizer_makes_of_them():
    model = with_separators(zoo.build("bert"))
    found = patterns_of(model, PAIRS)
    for index, pair in enumerate(PAIRS):
        made = model.tokenizer(*pair, return_tensors="pt")
        n = made["input_ids"].shape[1]
        assert made["token_type_ids"].any()
        with torch.no_grad():
            expected = model.original_model(**made, output_attentions=True).attentions
        for layer, one in enumerate(expected):
            torch.testing.assert_close(found[layer][index, :, :n, :n], one[0], rtol=0, atol=1e-5)
    (loaded,) = [patterns_of(model, iter([PAIRS]))]
    assert all(torch.equal(one, other) for one, other in zip(found, loaded, strict=True))


def in_columns(pairs):
    first, second = zip(*pairs)
    return {"premise": list(first), "answer": list(second), "label": [0] * len(pairs)}


@pytest.mark.parametrize(
    "entrance", ["mapping", "dataset", "table", "loader of rows", "rows.csv", "rows.jsonl"]
)
def test_two_columns_of_texts_are_pairs(entrance, tmp_path):
    model, given = with_separators(zoo.build("bert")), in_columns(PAIRS)
    expected = patterns_of(model, PAIRS)
    if entrance.startswith("rows."):
        table, path = pd.DataFrame(given), tmp_path / entrance
        if path.suffix == ".csv":
            table.to_csv(path, index=False)
        else:
            table.to_json(path, orient="records", lines=True)
        (data,) = stream_data(model, str(path), column="premise,answer")
        found = patterns_of(model, data)
    else:
        kinds = {
            "mapping": dict,
            "dataset": datasets.Dataset.from_dict,
            "table": pd.DataFrame,
            "loader of rows": lambda given: [
                {name: values[i] for name, values in given.items()} for i in range(len(PAIRS))
            ],
        }
        found = patterns_of(model, kinds[entrance](given), column="premise, answer", batch_size=2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_that_a_loader_has_collated_are_read_as_rows(size):
    """Torch gives a tuple for each place of a row: of two rows, two firsts were read as a pair."""
    model = with_separators(zoo.build("bert"))
    expected, single = (read_inputs(model, rows) for rows in (PAIRS, [one for one, _ in PAIRS]))
    for rows, meant in (
        (PAIRS, expected),
        ([(*pair, 1) for pair in PAIRS], expected),
        ([(first, 1) for first, _ in PAIRS], single),
    ):
        read = read_inputs(model, DataLoader(rows, batch_size=size))
        found = [one for batch in read.batches(1) for one in batch.tokens]
        assert [one.tolist() for one in found] == [one.tolist() for one in meant.rows]


def test_a_tuple_of_two_texts_is_neither_a_pair_nor_two_texts():
    """It was two texts here and a pair in `ask`."""
    with pytest.raises(InfoFlowError, match=r"expected \[\(first, second\)\] for a pair"):
        read_inputs(with_separators(zoo.build("bert")), PAIRS[0])


def test_a_pair_that_lacks_a_text_is_named():
    given = in_columns([*PAIRS, ("w5", None)])
    with pytest.raises(InfoFlowError, match=r"'answer' of inputs holds NoneType in row 2.*pairs"):
        read_inputs(with_separators(zoo.build("bert")), given, column="premise,answer")


def test_long_pairs_are_cut_as_their_tokenizer_does():
    """The longer text of a pair, and no separator: the end of the second was cut off."""
    model = with_separators(zoo.build("bert"))
    found = patterns_of(model, PAIRS[:1], max_length=6)
    made = model.tokenizer(*PAIRS[0], return_tensors="pt", truncation=True, max_length=6)
    with torch.no_grad():
        expected = model.original_model(**made, output_attentions=True).attentions
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    with pytest.raises(InfoFlowError, match=r"max_length is 4, .* puts 3 tokens .*: expected 5"):
        patterns_of(model, PAIRS[:1], max_length=4)


def test_pairs_without_a_separator_and_chats_without_a_template_are_refused():
    model = open_model(zoo.build("bert"), zoo.tokenizer())
    for given, match in (
        (PAIRS, "holds pairs of texts, between which the tokenizer puts nothing"),
        ([{"role": "user", "content": "w5"}], "the tokenizer has no chat template"),
    ):
        with pytest.raises(InfoFlowError, match=match):
            run_probes(model, given, [PatternsProbe()], progress=False)


CHAT = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
TEMPLATE = "<bos>{% for m in messages %} {{ m['content'] }} <eos>{% endfor %}"


def test_half_a_character_in_pairs_and_chats_is_named():
    """It ended in a TypeError of the tokenizer."""
    model = with_separators(zoo.build("bert"))
    model.tokenizer.chat_template = TEMPLATE
    for given in ([*PAIRS, ("w5", "w6 \ud800")], [CHAT, CHAT, [{**CHAT[0], "content": "\udfff"}]]):
        with pytest.raises(InfoFlowError, match=r"inputs\[2\] holds half a character"):
            read_inputs(model, given)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_ids_without_their_mask_are_warned_of(side, recwarn):
    """Padding was counted as tokens, without a word."""
    model = with_separators(zoo.build("llama"))
    model.tokenizer.pad_token, model.tokenizer.padding_side = "<eos>", side
    made = model.tokenizer(["w5", "w6 w7 w8 w9"], padding=True, return_tensors="pt")
    for given in (made, made["input_ids"][1:], ["w5 <eos> <eos>", "w6"]):
        read_inputs(model, given)
    assert not recwarn
    with pytest.warns(InfoFlowWarning, match=r"inputs\[0\] has [34] pad tokens at an end"):
        read_inputs(model, made["input_ids"])


@pytest.mark.parametrize(
    ("template", "content", "match"),
    [
        (TEMPLATE, [{"type": "text", "text": "w5"}], r"inputs\[1\] .* \(TypeError: "),
        ("{{ raise_exception('roles alternate') }}", "w5", r"\(TemplateError: roles alternate\)"),
    ],
)
def test_chats_that_a_template_does_not_take_are_named(template, content, match):
    """They ended in an error of the template's own."""
    model = with_separators(zoo.build("llama"))
    model.tokenizer.chat_template = template.replace("{{ m", "{{ '' + m")
    with pytest.raises(InfoFlowError, match=match):
        read_inputs(model, [CHAT, [{"role": "user", "content": content}]])


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"input_ids": ["[5, 6, 7]", "[8]"]}, r"'input_ids' of inputs holds texts, such as"),
        ({"tokens": ["[5, 6, 7]", "[8]"]}, r"'tokens' of inputs holds texts, such as"),
        ({"text": [["w5 w6", "w7"], ["w8"]]}, r"inputs\[0\] is a list of texts, \['w5 w6', 'w7'\]"),
    ],
)
def test_printed_lists_of_ids_and_lists_of_texts_are_no_texts(table, match):
    """A csv file holds ids as they are printed, which were read as words."""
    with pytest.raises(InfoFlowError, match=match):
        read_inputs(with_separators(zoo.build("llama")), table)


def test_chats_go_through_the_model_s_template_and_have_one_bos():
    model = with_separators(zoo.build("llama"))
    tokenizer = model.tokenizer
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %} w4{% endif %}"
    words = ["<bos>", "w5", "w6", "<eos>", "w7", "<eos>"]
    expected = tokenizer.convert_tokens_to_ids(words)
    assert next(iter(read_inputs(model, CHAT).rows)).tolist() == expected
    rows = list(read_inputs(model, [CHAT, CHAT[:1]]).rows)
    asked = tokenizer.convert_tokens_to_ids([*words[:4], "w4"])
    assert [row.tolist() for row in rows] == [expected, asked]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer(text)["input_ids"][:2] == [tokenizer.bos_token_id] * 2
    (read,) = read_inputs(model, [text]).rows
    assert read[:2].tolist() == expected[:2]


def test_visible_keys_are_those_of_the_call(case):
    """Packed documents differ from sequence to sequence: each token sees its own, up to itself."""
    model, _, _ = case("packed")
    batch = Batch(IDS, None, {"position_ids": PACKED})
    seen = run(model, batch, Needs.of(model, scores=True, pattern=True))
    document = (PACKED == 0).long().cumsum(dim=1)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = causal & (document[:, :, None] == document[:, None, :])
    for layer in range(2):
        assert torch.equal(seen.visible(layer), expected)


def test_mechanisms_of_packed_documents_are_those_of_the_documents_alone(case):
    """What a head's ideal looks at lies in the query's own document."""
    model, _, _ = case("packed")
    ids, point = IDS[:1], "blocks.1.hook_resid_post"
    with substituted(model, {(0, 0): "own_position", (1, 2): "global"}):
        found = run(model, Batch(ids, None, {"position_ids": PACKED[:1]}), (point,))
        alone = run(model, Batch(ids[:, 3:]), (point,))
    torch.testing.assert_close(
        found.activation(point)[:, 3:], alone.activation(point), rtol=0, atol=1e-5
    )
