"""GPT-2 by hand, in float64 and with loops, and its scores with a part of a state taken out.

A part is taken out while the mean and the scale of the norm stay those of the whole state, so what
a score loses is what the part gave it.
"""

import math

import torch


def weights(model):
    """The weights of a model of transformers, float64."""
    return {
        name.removeprefix("transformer."): value.detach().double()
        for name, value in model.state_dict().items()
    }


def normed(whole, part, gain):
    """A part of a state as the layer norm of the whole state scales it, without its bias."""
    scale = math.sqrt(float(whole.var(correction=0)) + 1e-5)
    return (part - part.mean()) / scale * gain


class Gpt2:
    """What wrote each state, by name, and scores of states.

    Attributes:
        parts: by layer, a dict of name -> [pos, d_model], of the stream that enters the layer.
    """

    def __init__(self, model, ids):
        self.w, self.n_heads = weights(model), model.config.n_head
        self.parts, n = [], len(ids)
        stream = {
            "token embedding": self.w["wte.weight"][ids],
            "positional embedding": self.w["wpe.weight"][:n],
        }
        for layer in range(model.config.n_layer):
            self.parts.append(dict(stream))
            stream |= self.heads(layer, sum(stream.values()))
            stream[f"MLP {layer}"] = self.mlp(layer, sum(stream.values()))

    def layer_weight(self, layer, name):
        return self.w[f"h.{layer}.{name}"]

    def norm(self, layer, which, state):
        gain, bias = (self.layer_weight(layer, f"{which}.{x}") for x in ("weight", "bias"))
        return normed(state, state, gain) + bias

    def columns(self, kind, head, d_model):
        d_head = d_model // self.n_heads
        start = {"q": 0, "k": 1, "v": 2}[kind] * d_model + head * d_head
        return slice(start, start + d_head)

    def project(self, layer, kind, head, vector):
        """Without its bias."""
        weight = self.layer_weight(layer, "attn.c_attn.weight")
        return vector @ weight[:, self.columns(kind, head, len(weight))]

    def bias(self, layer, kind, head):
        weight = self.layer_weight(layer, "attn.c_attn.weight")
        return self.layer_weight(layer, "attn.c_attn.bias")[self.columns(kind, head, len(weight))]

    def heads(self, layer, states):
        """What each head writes, and the bias of all."""
        found, n, d_model = {}, *states.shape
        d_head = d_model // self.n_heads
        output = self.layer_weight(layer, "attn.c_proj.weight")
        for head in range(self.n_heads):
            rows = []
            for t in range(n):
                scores = [self.score(layer, head, states[t], states[j]) for j in range(t + 1)]
                pattern = torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
                z = sum(
                    pattern[j]
                    * (
                        self.project(layer, "v", head, self.norm(layer, "ln_1", states[j]))
                        + self.bias(layer, "v", head)
                    )
                    for j in range(t + 1)
                )
                rows.append(z @ output[head * d_head : (head + 1) * d_head])
            found[f"head {layer}.{head}"] = torch.stack(rows)
        bias = self.layer_weight(layer, "attn.c_proj.bias")
        return found | {f"attention bias {layer}": bias.expand(n, -1)}

    def mlp(self, layer, states):
        rows = []
        for state in states:
            x = self.norm(layer, "ln_2", state) @ self.layer_weight(layer, "mlp.c_fc.weight")
            x = x + self.layer_weight(layer, "mlp.c_fc.bias")
            x = torch.nn.functional.gelu(x, approximate="tanh")
            x = x @ self.layer_weight(layer, "mlp.c_proj.weight")
            rows.append(x + self.layer_weight(layer, "mlp.c_proj.bias"))
        return torch.stack(rows)

    def score(self, layer, head, query_state, key_state, without_query=None, without_key=None):
        """A score; with a part of a state taken out, a vector or the name of a bias."""
        vectors = []
        for kind, state, without in (
            ("q", query_state, without_query),
            ("k", key_state, without_key),
        ):
            gain, bias = (self.layer_weight(layer, f"ln_1.{x}") for x in ("weight", "bias"))
            part = state - without if isinstance(without, torch.Tensor) else state
            x = normed(state, part, gain) + bias * (without != "norm bias")
            vector = self.project(layer, kind, head, x)
            vectors.append(vector + self.bias(layer, kind, head) * (without != f"b_{kind.upper()}"))
        return float(vectors[0] @ vectors[1]) / math.sqrt(len(vectors[0]))

    def pieces(self, layer, head, query, keys):
        """Names of the query's and the keys' parts, and what each pair gives the margin.

        By taking out the query's part, the key's part, and both.
        """
        parts = self.parts[layer]
        states = sum(parts.values())
        query_names = [*parts, "norm bias", "b_Q"]
        key_names = [*parts, "norm bias", "b_K"]

        def taken(name, position):
            return parts[name][position] if name in parts else name

        table = []
        for one in query_names:
            row = []
            for other in key_names:
                sides = []
                for key in keys:
                    cut = taken(one, query), taken(other, key)

                    def score(a=None, b=None, key=key):
                        return self.score(layer, head, states[query], states[key], a, b)

                    sides.append(score() - score(cut[0]) - score(None, cut[1]) + score(*cut))
                row.append(sides[0] - sides[1])
            table.append(row)
        return query_names, key_names, torch.tensor(table, dtype=torch.float64)
