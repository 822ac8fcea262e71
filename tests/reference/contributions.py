"""Contributions to a power, from the modules of a plain model of transformers, pair by pair."""

import numpy as np
import torch


def _seen(modules, run):
    """What modules read and gave, in one pass."""
    found = {}
    handles = [
        module.register_forward_hook(
            lambda _, args, out, name=name: found.update({name: (args[0] if args else None, out)})
        )
        for name, module in modules.items()
    ]
    with torch.no_grad():
        output = run()
    for handle in handles:
        handle.remove()
    return found, output


def _of_llama(model, ids):
    blocks = model.model.layers
    modules = {(i, "v"): b.self_attn.v_proj for i, b in enumerate(blocks)}
    modules |= {(i, "in"): b.input_layernorm for i, b in enumerate(blocks)}
    found, output = _seen(modules, lambda: model(ids, output_attentions=True))
    for i, block in enumerate(blocks):
        yield (
            output.attentions[i][0],
            found[i, "v"][1][0],
            block.self_attn.o_proj.weight,
            found[i, "in"][0][0],
            block.post_attention_layernorm.weight,
            False,
            1.0,
        )


def _of_bert(model, ids):
    blocks = model.encoder.layer
    modules = {(i, "v"): b.attention.self.value for i, b in enumerate(blocks)}
    modules |= {(i, "in"): b.attention.self.query for i, b in enumerate(blocks)}
    found, output = _seen(modules, lambda: model(ids, output_attentions=True))
    for i, block in enumerate(blocks):
        out = block.attention.output
        yield (
            output.attentions[i][0],
            found[i, "v"][1][0],
            out.dense.weight,
            found[i, "in"][0][0],
            out.LayerNorm.weight,
            True,
            1.0,
        )


def _of_sandwich(model, ids):
    """Norms on what attention adds: before the next one (Gemma 2), or alone (OLMo 2)."""
    blocks = model.model.layers
    gemma = hasattr(blocks[0], "pre_feedforward_layernorm")
    modules = {(i, "v"): b.self_attn.v_proj for i, b in enumerate(blocks)}
    modules |= {(i, "in"): b for i, b in enumerate(blocks)}
    modules |= {(i, "added"): b.post_attention_layernorm for i, b in enumerate(blocks)}
    found, output = _seen(modules, lambda: model(ids, output_attentions=True))
    for i, block in enumerate(blocks):
        added = found[i, "added"][0][0].double()
        weight = block.post_attention_layernorm.weight.double() + gemma
        epsilon = getattr(block.post_attention_layernorm, "eps", 1e-6)
        root = (added.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
        reader = torch.ones(1)  # OLMo 2 has no norm before a block's parts, and one behind the last
        if gemma:
            reader = 1 + block.pre_feedforward_layernorm.weight
        elif block is blocks[-1]:
            reader = model.model.norm.weight
        yield (
            output.attentions[i][0],
            found[i, "v"][1][0],
            block.self_attn.o_proj.weight,
            found[i, "in"][0][0],
            reader,
            False,
            weight / root,
        )


def edges(model, ids, order=1):
    """Sizes of what each query takes from each key, [layer, query, key], of one sequence."""
    sandwich = type(model).__name__.startswith(("Gemma2", "Olmo2"))
    read = _of_sandwich if sandwich else _of_bert if hasattr(model, "encoder") else _of_llama
    rows = []
    for pattern, v, output, before, gain, centers, scale in read(model, ids):
        n_heads, n, _ = pattern.shape
        d_head = output.shape[1] // n_heads
        v = v.reshape(n, -1, d_head).double()
        v = v.repeat_interleave(n_heads // v.shape[1], dim=1)
        w_o = output.double().reshape(-1, n_heads, d_head)  # [d_model, head, d_head]
        brought = torch.einsum("khd,mhd->khm", v, w_o)
        found = torch.zeros(n, n, dtype=torch.float64)
        for query in range(n):
            part = torch.einsum("hk,khm->km", pattern[:, query].double(), brought)
            part = part * (scale if isinstance(scale, float) else scale[query])
            part[query] += before[query].double()
            part = part - part.mean(dim=-1, keepdim=True) if centers else part
            found[query] = (part * gain.double()).norm(p=order, dim=-1)
        rows.append(found.detach().numpy())
    return np.stack(rows)


def power_rollout(sizes, p, own=1.0):
    """Rows of powers, the own one several times, multiplied from the lowest layer up."""
    found, held = [], np.eye(sizes.shape[1])
    for layer in sizes:
        raised = (layer / layer.max(axis=1, keepdims=True)) ** p
        raised[np.diag_indices(len(raised))] *= own
        held = raised / raised.sum(axis=1, keepdims=True) @ held
        found.append(held)
    return np.stack(found)


def peakedness(patterns):
    """The mean of 1 - entropy / log(keys) over heads and queries of causal patterns."""
    found = []
    for pattern in patterns:
        for head in pattern:
            for query, row in enumerate(np.asarray(head)):
                seen = row[: query + 1]
                seen = seen[seen > 0]  # others lie behind a window
                if len(seen) > 1:
                    found.append(1 + (seen * np.log(seen)).sum() / np.log(len(seen)))
    return np.mean(found)
