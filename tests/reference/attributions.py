"""Attributions of the field, number by number, from the modules of a plain BERT or Llama."""

import torch


def _catch(modules, run):
    """What modules read and gave, in one pass."""
    found, handles = {}, []
    for name, module in modules.items():
        handles.append(
            module.register_forward_hook(
                lambda _, args, kwargs, out, name=name: found.update(
                    {name: (args[0] if args else kwargs["hidden_states"], out)}
                ),
                with_kwargs=True,
            )
        )
    with torch.no_grad():
        output = run()
    for handle in handles:
        handle.remove()
    return found, output


class Layer:
    """One layer of one text: what entered, patterns, and its modules under common names."""

    def __init__(self, model, ids, index):
        bert = hasattr(model, "encoder")
        block = model.encoder.layer[index] if bert else model.model.layers[index]
        attention = block.attention if bert else block.self_attn
        self.value = attention.self.value if bert else attention.v_proj
        self.output = attention.output.dense if bert else attention.o_proj
        self.norms = (
            (attention.output.LayerNorm, block.output.LayerNorm)
            if bert
            else (block.input_layernorm, block.post_attention_layernorm)
        )
        self.bert, self.block = bert, block
        modules = {"block": block, "value": self.value, "first": self.norms[0]}
        modules["second"] = self.norms[1]
        self.seen, output = _catch(modules, lambda: model(ids, output_attentions=True))
        self.pattern = output.attentions[index][0]
        self.x = self.seen["block"][0][0]

    def taken(self, i, j, heads=None):
        """What query i takes from key j."""
        n_heads, total = len(self.pattern), torch.zeros_like(self.x[0])
        width = self.output.weight.shape[1] // n_heads
        values = self.seen["value"][1][0, j].reshape(-1, width)
        for head in range(n_heads):
            value = values[head * len(values) // n_heads]
            matrix = self.output.weight[:, head * width : (head + 1) * width]
            total = total + self.pattern[head, i, j] * (matrix @ value)
        return total

    def parts(self, i):
        """With the residual stream, of all keys, and the whole."""
        rows = [self.taken(i, j) + (self.x[i] if i == j else 0) for j in range(len(self.x))]
        bias = self.output.bias
        return rows, sum(rows) + (0 if bias is None else bias)


def _norm(module, part, whole):
    """A norm of a part, with the scale of the whole, without its bias."""
    if isinstance(module, torch.nn.LayerNorm):
        scale = (whole.var(unbiased=False) + module.eps).sqrt()
        return (part - part.mean()) / scale * module.weight
    return part / (whole.square().mean() + module.variance_epsilon).sqrt() * module.weight


def _divide(rows):
    return rows / rows.sum(dim=1, keepdim=True)


@torch.no_grad()
def layers(model, ids):
    """Norms, GlobEnc and ALTI of each layer, pair by pair."""
    found = []
    n = ids.shape[1]
    for index in range(model.config.num_hidden_layers):
        layer = Layer(model, ids, index)
        norms, globenc, alti = (torch.zeros(n, n, dtype=layer.x.dtype) for _ in range(3))
        for i in range(n):
            parts, whole = layer.parts(i)
            for j in range(n):
                norms[i, j] = layer.taken(i, j).square().sum().sqrt()
                if layer.bert:
                    near = _norm(layer.norms[0], parts[j], whole)
                    full = layer.seen["first"][1][0, i]
                    sum_2 = layer.seen["second"][0][0, i]
                    globenc[i, j] = _norm(layer.norms[1], near, sum_2).square().sum().sqrt()
                else:
                    near, full = parts[j], whole
                    globenc[i, j] = near.square().sum().sqrt()
                alti[i, j] = max(0, full.abs().sum() - (full - near).abs().sum())
        found.append((norms, _divide(globenc), _divide(alti)))
    return found


def roll_out(rows):
    """Sums over all paths, one step at a time."""
    held, found = torch.eye(len(rows[0]), dtype=rows[0].dtype), []
    for layer in rows:
        new = torch.zeros_like(held)
        for i in range(len(held)):
            for j in range(len(held)):
                for k in range(len(held)):
                    new[i, k] += layer[i, j] * held[j, k]
        held = new
        found.append(held)
    return found


@torch.no_grad()
def alti_logit(model, ids, token):
    """What each token adds to a logit of the last position of a Llama."""
    n, rows = ids.shape[1], [alti for _, _, alti in layers(model, ids)]
    found, _ = _catch({"norm": model.model.norm}, lambda: model(ids))
    last = found["norm"][0][0, -1]
    below = [torch.eye(n, dtype=last.dtype), *roll_out(rows)]
    scores = torch.zeros(n, dtype=last.dtype)
    for index in range(len(rows)):
        layer = Layer(model, ids, index)
        for j in range(n):
            added = _norm(model.model.norm, layer.taken(n - 1, j), last)
            scores += (added @ model.lm_head.weight[token]) * below[index][j]
    return scores


def _share(vectors, bias):
    """A bias among the vectors of one position, by their products with it."""
    if bias is None:
        return vectors
    products = [abs(float(vector @ bias)) for vector in vectors]
    total = sum(products) + 1e-12
    return [v + p / total * bias for v, p in zip(vectors, products, strict=True)]


@torch.no_grad()
def decompose(model, ids):
    """DecompX: vectors [layer][pos][source] that sum to what leaves a layer."""
    n = ids.shape[1]
    first = Layer(model, ids, 0).x
    held = [
        [first[i] if k == i else torch.zeros_like(first[i]) for k in range(n)] for i in range(n)
    ]
    found = []

    def normed(module, vectors):
        whole = sum(vectors)
        return _share([_norm(module, one, whole) for one in vectors], getattr(module, "bias", None))

    for index in range(model.config.num_hidden_layers):
        layer = Layer(model, ids, index)
        block, n_heads = layer.block, len(layer.pattern)
        read = held if layer.bert else [normed(layer.norms[0], one) for one in held]
        width = layer.output.weight.shape[1] // n_heads
        after = []
        for i in range(n):
            row = []
            for k in range(n):
                total = held[i][k].clone()
                for head in range(n_heads):
                    matrix = layer.output.weight[:, head * width : (head + 1) * width]
                    values = layer.value.weight.reshape(-1, width, layer.value.weight.shape[1])
                    value = values[head * len(values) // n_heads]
                    for j in range(n):
                        total += layer.pattern[head, i, j] * (matrix @ (value @ read[j][k]))
                row.append(total)
            if layer.bert:
                row = _share(row, layer.output.weight @ layer.value.bias + layer.output.bias)
                row = normed(layer.norms[0], row)
            after.append(row)
        held = []
        for row in after:
            read_here = row if layer.bert else normed(layer.norms[1], row)
            if layer.bert:
                up, down = block.intermediate.dense, block.output.dense
                hidden = _share([up.weight @ one for one in read_here], up.bias)
                whole = sum(hidden)
                slope = block.intermediate.intermediate_act_fn(whole) / whole
            else:
                up, down = block.mlp.up_proj, block.mlp.down_proj
                hidden = [up.weight @ one for one in read_here]
                slope = block.mlp.act_fn(block.mlp.gate_proj(sum(read_here)))
            brought = _share([down.weight @ (slope * one) for one in hidden], down.bias)
            row = [one + more for one, more in zip(row, brought, strict=True)]
            held.append(normed(layer.norms[1], row) if layer.bert else row)
        found.append(held)
    return found
