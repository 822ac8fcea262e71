"""A two-layer attention-only induction circuit by hand (Olsson et al. 2022), and data for it."""

import warnings

import torch

SHARP = 30.0


def induction_model(n_vocab, n_ctx):
    """Columns: token, position, copied previous token, answer.

    Layer 0 copies the token before; layer 1 finds where the present token is the copied one, that
    is, the position behind its earlier occurrence, and copies the token there to the answer.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    d = 3 * n_vocab + n_ctx
    config = HookedTransformerConfig(
        n_layers=2,
        n_heads=1,
        d_head=d,
        d_model=d,
        n_ctx=n_ctx,
        d_vocab=n_vocab,
        attn_only=True,
        normalization_type=None,
        use_attn_scale=False,
        init_weights=False,
        device="cpu",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = HookedTransformer(config)
    token = range(n_vocab)
    place = range(n_vocab, n_vocab + n_ctx)
    previous = range(n_vocab + n_ctx, 2 * n_vocab + n_ctx)
    answer = range(2 * n_vocab + n_ctx, d)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    unit = torch.eye(d)
    state["embed.W_E"] = unit[list(token)]
    state["pos_embed.W_pos"] = unit[list(place)]
    state["unembed.W_U"] = SHARP * unit[:, list(answer)]

    def copies(sources, targets):
        matrix = torch.zeros(d, d)
        matrix[list(sources), list(targets)] = 1
        return matrix

    def set_layer(layer, query, value):
        state[f"blocks.{layer}.attn.W_Q"] = query[None]
        state[f"blocks.{layer}.attn.W_K"] = unit[None]
        state[f"blocks.{layer}.attn.W_V"] = value[None]
        state[f"blocks.{layer}.attn.W_O"] = unit[None]

    set_layer(0, SHARP * copies(place[1:], place[:-1]), copies(token, previous))
    set_layer(1, SHARP * copies(token, previous), copies(token, answer))
    for name, buffer in model.state_dict().items():
        if name.endswith((".mask", ".IGNORE")):
            state[name] = buffer
    model.load_state_dict(state)
    return model


def repeated_segments(n_vocab, n, seed=0):
    """Six different random tokens, then three of them in a row again; and where these began."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(n, n_vocab, generator=generator).argsort(dim=1)[:, :6]
    # the first token has none before it, and is its own in layer 0
    starts = torch.randint(1, 4, (n,), generator=generator)
    again = first.gather(1, starts[:, None] + torch.arange(3))
    return torch.cat([first, again], dim=1), starts
