"""A two-layer attention-only induction circuit by hand (Olsson et al. 2022), and data for it."""

import torch

from tests.conftest import make_token_model

SHARP = 30.0


def induction_model(n_vocab, n_ctx):
    """Columns: token, position, copied previous token, answer.

    Layer 0 copies the token before; layer 1 finds where the present token is the copied one, that
    is, the position behind its earlier occurrence, and copies the token there to the answer.
    """
    d = 3 * n_vocab + n_ctx
    model = make_token_model(
        n_layers=2,
        n_heads=1,
        d_head=d,
        d_model=d,
        n_ctx=n_ctx,
        d_vocab=n_vocab,
        attn_only=True,
        normalization_type=None,
    )
    token = range(n_vocab)
    place = range(n_vocab, n_vocab + n_ctx)
    previous = range(n_vocab + n_ctx, 2 * n_vocab + n_ctx)
    answer = range(2 * n_vocab + n_ctx, d)
    unit = torch.eye(d)

    def copies(sources, targets):
        matrix = torch.zeros(d, d)
        matrix[list(sources), list(targets)] = 1
        return matrix

    def set_layer(layer, query, value):
        attn = model.blocks[layer].attn
        attn.W_Q.copy_(query[None] * d**0.5)  # scores are divided by the root of d_head
        attn.W_K.copy_(unit[None])
        attn.W_V.copy_(value[None])
        attn.W_O.copy_(unit[None])

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E.copy_(unit[list(token)])
        model.pos_embed.W_pos.copy_(unit[list(place)])
        model.unembed.W_U.copy_(SHARP * unit[:, list(answer)])
        set_layer(0, SHARP * copies(place[1:], place[:-1]), copies(token, previous))
        # a token without a match prefers itself, by so little that it spreads its attention
        match = copies(token, previous) + 1e-3 * copies(token, token)
        set_layer(1, SHARP * match, copies(token, answer))
    return model


def repeated_segments(n_vocab, n, seed=0):
    """Six different random tokens, then three of them in a row again; and where these began."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(n, n_vocab, generator=generator).argsort(dim=1)[:, :6]
    # the first token has none before it, and is its own in layer 0
    starts = torch.randint(1, 4, (n,), generator=generator)
    again = first.gather(1, starts[:, None] + torch.arange(3))
    return torch.cat([first, again], dim=1), starts
