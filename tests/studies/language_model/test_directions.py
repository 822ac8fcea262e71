"""Directions of queries and tempered heads, against brute force and scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from infoflow_lens import InfoFlowError, load_any
from infoflow_lens.studies.language_model.queries import directions, projecting
from infoflow_lens.studies.language_model.softness import _Control, _Layer
from infoflow_lens.studies.tempering import mean_entropy, temper
from tests.reference import zoo

N, T = 20, 8
D_HEAD, N_HEADS = zoo.D_HEAD, zoo.N_HEADS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    zoo.save("gpt2", folder)
    return load_any(folder).model


@pytest.fixture(scope="module")
def tokens():
    return zoo.tokens(N, T)


@pytest.fixture(scope="module")
def cache(model, tokens):
    with torch.no_grad():
        return model.run_with_cache(tokens)[1]


@pytest.fixture(scope="module")
def found(model, tokens):
    return directions(model, tokens, batch_size=4)


def scores_over_all_keys(cache, layer, head):
    """[query, key], of every query from position 1 with every key of every sequence."""
    q, k = (cache[f"blocks.{layer}.attn.hook_{name}"][:, :, head].double() for name in "qk")
    return q[:, 1:].flatten(0, 1) @ k.flatten(0, 1).T / D_HEAD**0.5


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (0, 1), (1, 0)])
def test_directions_hold_the_variances_and_covariances_of_scores(cache, found, layer, head):
    scores = scores_over_all_keys(cache, layer, head)
    apart = scores - scores.mean(dim=1, keepdim=True)
    u = found[layer].u[head]
    torch.testing.assert_close(u @ u.T, apart @ apart.T / scores.shape[1], rtol=1e-3, atol=1e-5)


def test_roles_are_one_over_the_mean_squared_cosine(found):
    for own in found:
        for head, roles in enumerate(own.roles().tolist()):
            u = own.u[head]
            energy = u.square().sum(dim=1)
            cosine = (u @ u.T) / (energy[:, None] * energy).sqrt()
            weight = energy[:, None] * energy
            assert roles == pytest.approx(float(weight.sum() / (weight * cosine.square()).sum()))


def test_queries_along_one_line_have_one_role(model, tokens):
    along = torch.ones(D_HEAD) / D_HEAD**0.5

    def onto_a_line(q, hook):
        return (q @ along)[..., None] * along

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", onto_a_line)]):
        own = directions(model, tokens, batch_size=4)[0]
    torch.testing.assert_close(own.roles(), torch.ones(N_HEADS).double(), rtol=1e-3, atol=1e-3)


def test_the_first_key_can_be_left_out(model, tokens, cache):
    own = directions(model, tokens, batch_size=4, first_key=1)[0]
    q, k = (cache[f"blocks.0.attn.hook_{name}"][:, :, 1].double() for name in "qk")
    scores = q[:, 1:].flatten(0, 1) @ k[:, 1:].flatten(0, 1).T / D_HEAD**0.5
    variance = scores.var(dim=1, correction=0)
    torch.testing.assert_close(own.u[1].square().sum(dim=1), variance, rtol=1e-3, atol=1e-5)


def test_shares_of_the_energy_by_label(found, tokens):
    own = found[0]
    n_queries = own.u.shape[1]
    generator = torch.Generator().manual_seed(0)
    chance = [own.share_by(torch.randint(5, (n_queries,), generator=generator)) for _ in range(200)]
    assert torch.stack(chance).mean(dim=0).abs().max() < 0.02  # labels that say nothing
    u = own.u[0]
    label = torch.arange(n_queries) % 3
    means = torch.stack([u[label == i].mean(dim=0) for i in range(3)])
    between = sum(int((label == i).sum()) * (means[i] - u.mean(0)).square().sum() for i in range(3))
    within = sum((u[label == i] - means[i]).square().sum() for i in range(3))
    expected = (between - 2 * within / (n_queries - 3)) / u.square().sum()
    assert float(own.share_by(label)[0]) == pytest.approx(float(expected))


def test_all_directions_are_the_model_itself_and_none_is_attention_to_all(model, tokens, found):
    def run(rank):
        hooks = projecting(found, [own.axes[:, :, :rank] for own in found])
        patterns = []
        hooks.append(("blocks.0.attn.hook_pattern", lambda p, hook: patterns.append(p)))
        with torch.no_grad():
            return model.run_with_hooks(tokens, fwd_hooks=hooks), patterns[0]

    with torch.no_grad():
        plain = model(tokens)
    torch.testing.assert_close(run(D_HEAD)[0], plain, rtol=1e-3, atol=1e-3)
    even = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    torch.testing.assert_close(run(0)[1], even.expand(N, N_HEADS, T, T), rtol=1e-4, atol=1e-5)


# Softness


@pytest.fixture(scope="module")
def seen(model, tokens):
    return _Layer(model, 1, tokens)


def test_a_tempered_head_has_the_entropy_that_is_asked_for(seen):
    drawn = _Control(seen, 0).scores
    for entropy in (0.1, 0.6, 1.2):
        pattern = temper(drawn, seen.allowed, entropy)
        assert mean_entropy(pattern, seen.allowed) == pytest.approx(entropy, abs=1e-3)
        assert pattern.masked_select(~seen.allowed).eq(0).all()
        torch.testing.assert_close(pattern.sum(dim=2), torch.ones(N, T))


def test_what_is_unexplained_is_that_of_least_squares(seen):
    pattern = seen.pattern[:, 0]
    target = torch.stack([seen.embedding[i, pattern[i].argmax(dim=1)] for i in range(N)])
    x, y = (part[:, 1:].double().numpy() for part in (seen.z[:, :, 0], target))
    held_out = np.arange(N) % 5 == 4
    model = LinearRegression().fit(np.concatenate(x[~held_out]), np.concatenate(y[~held_out]))
    shown = np.concatenate(y[held_out])
    wrong = np.square(model.predict(np.concatenate(x[held_out])) - shown).sum()
    expected = wrong / np.square(shown - shown.mean(axis=0)).sum()
    assert seen.measure_fvu(pattern, seen.z[:, :, 0]) == pytest.approx(expected, rel=1e-3)


def test_a_head_that_shows_its_token_leaves_nothing(seen):
    pattern = seen.pattern[:, 0]
    shown = torch.stack([seen.embedding[i, pattern[i].argmax(dim=1)] for i in range(N)])
    assert seen.measure_fvu(pattern, 2 * shown) < 1e-6


def test_a_model_that_turns_queries_behind_the_hook_points_is_refused_by_name():
    """Pythia's kind; its bridge lists points behind the rotation that never fire."""
    with pytest.raises(InfoFlowError, match="rotary embeddings"):
        directions(zoo.bridge("gpt_neox"), zoo.tokens(4, T), batch_size=4)
