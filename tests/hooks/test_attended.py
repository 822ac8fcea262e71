"""Attended keys against the cached pattern."""

import torch

from infoflow_lens import propagate, run_probes
from infoflow_lens.hooks import AttendedProbe, AttendedResult


def test_attended_keys_have_their_share_of_the_largest_weight(model, inputs):
    (result,) = run_probes(model, inputs, [AttendedProbe(0.4)], batch_size=5, progress=False)
    _, cache = model.run_with_cache(inputs)
    for layer, attended in enumerate(result.attended):
        pattern = cache["pattern", layer]
        assert attended.equal((pattern >= 0.4 * pattern.amax(-1, keepdim=True)) & (pattern > 0))
        assert attended.any(dim=-1).all()


def test_with_share_1_the_attended_key_is_the_argmax(model, inputs):
    (result,) = run_probes(model, inputs, [AttendedProbe(1.0)], progress=False)
    _, cache = model.run_with_cache(inputs)
    assert result.attended[1].to(torch.int64).argmax(-1).equal(cache["pattern", 1].argmax(-1))


def test_weights_of_zero_never_count(token_model, token_inputs):
    (result,) = run_probes(token_model, token_inputs, [AttendedProbe(0.0)], progress=False)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    assert not (result.attended[0] & future).any()
    assert (result.attended[0] | future).all()


def test_its_positions_propagate_to_the_union_of_attended_sets(token_model, token_inputs):
    (result,) = run_probes(token_model, token_inputs, [AttendedProbe(0.9)], progress=False)
    members = propagate(result.positions).members
    sets = torch.eye(9, dtype=torch.bool).expand(19, -1, -1)
    for layer, attended in enumerate(result.attended):
        sets = sets | (attended.any(dim=1).float() @ sets.float() > 0)
        assert members[layer].equal(sets)


def test_padding_is_no_query(token_model, token_inputs):
    rows = [token_inputs[0].tolist(), token_inputs[1][:2].tolist(), token_inputs[2][:5].tolist()]
    (result,) = run_probes(token_model, rows, [AttendedProbe()], progress=False)
    alone = [run_probes(token_model, [r], [AttendedProbe()], progress=False)[0] for r in rows]
    frames = [one.to_frame() for one in alone]
    frame, sizes = result.to_frame(), [len(row) for row in rows]
    for name in ("mean_keys", "silent_queries"):
        of_rows = torch.tensor([one[name].tolist() for one in frames], dtype=torch.float64)
        mean = (of_rows * torch.tensor(sizes)[:, None]).sum(0) / sum(sizes)
        torch.testing.assert_close(torch.tensor(frame[name].tolist()), mean.float())
    for axes in result.plot(layer=0).axes[:2]:
        assert axes.images[0].get_array().max() == 1.0  # of BOS, by all sequences


def test_its_result_is_saved_shown_and_merged(model, inputs, tmp_path):
    (whole,) = run_probes(model, inputs, [AttendedProbe()], progress=False)
    halves = [AttendedProbe(), AttendedProbe()]
    run_probes(model, inputs[:9], halves[:1], progress=False)
    run_probes(model, inputs[9:], halves[1:], progress=False)
    merged = halves[0].merge(halves[1]).result()
    whole.save(tmp_path / "attended")
    loaded = AttendedResult.load(tmp_path / "attended")
    for other in (merged, loaded):
        assert all(a.equal(b) for a, b in zip(whole.attended, other.attended, strict=True))
    frame = whole.to_frame()
    assert list(frame["head"]) == [0, 1, 0, 1, 2, 3, 4]
    assert frame["mean_keys"].between(1, 7).all()
    panels = [axes.get_title() for axes in whole.plot(layer=1).axes]
    assert [name for name in panels if name] == [f"head {i}" for i in range(5)]
