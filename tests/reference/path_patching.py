"""Exchanges between two texts in a plain Llama of transformers, with hooks of torch alone.

Slow and simple: each input of each reader of a path is found by a whole pass in which the output of
every attention is pinned (Wang et al. 2023, path patching, with MLPs on the way).
"""

from contextlib import ExitStack

import torch


class TwoTexts:
    """A Llama of transformers, two texts as ids [pos], and a function of the logits [pos, token].

    Nodes are (layer, head, position), head -1 the embedding; paths (writer, reader or None, kind).
    """

    def __init__(self, model, clean, other, read):
        self.model, self.read = model, read
        self.n_heads = model.config.num_attention_heads
        self.n_kv = model.config.num_key_value_heads
        self.layers = model.model.layers
        with torch.no_grad():
            self.texts = [clean[None], other[None]]
            self.embedded = [model.model.embed_tokens(ids)[0] for ids in self.texts]
            runs = [self._run(embedded) for embedded in self.embedded]
        self.values = [self.read(run["logits"]) for run in runs]
        self.z = [run["z"] for run in runs]
        self.states = [run["states"] for run in runs]
        self.mlps = [run["mlps"] for run in runs]

    @torch.no_grad()
    def _run(self, embedded, pins=None, projections=None, states=None, mlps=None):
        """One pass: logits, and by layer states [pos, d], z [pos, n_heads * d_head], q, k, v."""
        seen = {"z": {}, "q": {}, "k": {}, "v": {}, "states": {}, "mlps": {}}
        with ExitStack() as stack:

            def hook(module, function, before=False):
                register = (
                    module.register_forward_pre_hook if before else module.register_forward_hook
                )
                stack.callback(register(function).remove)

            for layer, block in enumerate(self.layers):

                def state(module, args, layer=layer):
                    new = args[0].clone()
                    for position, value in (states or {}).get(layer, {}).items():
                        new[0, position] = value
                    seen["states"][layer] = new[0]
                    return (new, *args[1:])

                def z(module, args, layer=layer):
                    new = args[0].clone()
                    if pins is not None and layer in pins:
                        new[0] = pins[layer]
                    seen["z"][layer] = new[0]
                    return (new,)

                def mlp(module, args, out, layer=layer):
                    new = mlps[layer][None] if mlps and layer in mlps else out
                    seen["mlps"][layer] = new[0]
                    return new

                hook(block, state, before=True)
                hook(block.self_attn.o_proj, z, before=True)
                hook(block.mlp, mlp)
                for side in "qkv":

                    def project(module, args, out, layer=layer, side=side):
                        out = out.clone()
                        for (position, head), value in (
                            (projections or {}).get((layer, side), {}).items()
                        ):
                            width = len(value)
                            out[0, position, head * width : (head + 1) * width] = value
                        seen[side][layer] = out[0]
                        return out

                    hook(getattr(block.self_attn, f"{side}_proj"), project)
            seen["logits"] = self.model(inputs_embeds=embedded[None]).logits[0]
        return seen

    def effect(self, **changes):
        """What changes do to the value of the clean text."""
        return float(self.read(self._run(self.embedded[0], **changes)["logits"]) - self.values[0])

    def of_head(self, layer, head):
        """The effect of a head at all positions."""
        pinned = self.z[0][layer].clone()
        pinned[:, self._slice(head)] = self.z[1][layer][:, self._slice(head)]
        return self.effect(pins={layer: pinned})

    def of_mlp(self, layer):
        """The effect of an MLP at all positions."""
        return self.effect(mlps={layer: self.mlps[1][layer]})

    def of_state(self, layer, position):
        """The effect of a state that enters a layer."""
        return self.effect(states={layer: {position: self.states[1][layer][position]}})

    def of_token(self, position, token):
        """The effect of another token."""
        embedded = self.embedded[0].clone()
        with torch.no_grad():
            embedded[position] = self.model.model.embed_tokens(torch.tensor(token))
        return float(self.read(self._run(embedded)["logits"]) - self.values[0])

    def _slice(self, head):
        width = self.z[0][0].shape[1] // self.n_heads
        return slice(head * width, (head + 1) * width)

    def share(self, paths, swap=False):
        """What paths keep when all else is frozen at the other text; swapped, what is lost."""
        frozen, live = (0, 1) if swap else (1, 0)
        known = {}

        def stream(position, writers):
            """A pass in which all attention is frozen, but for writers at one position."""
            embedded = self.embedded[frozen].clone()
            pins = {layer: z.clone() for layer, z in self.z[frozen].items()}
            for layer, head, _ in writers:
                if head < 0:
                    embedded[position] = self.embedded[live][position]
                else:
                    pins[layer][position, self._slice(head)] = z_of((layer, head, position))
            return self._run(embedded, pins)

        def inputs(reader):
            grouped = {}
            for writer, read_by, kind in paths:
                if read_by == reader:
                    grouped.setdefault((kind, writer[2]), []).append(writer)
            return grouped

        def z_of(node):
            if node not in known:
                layer, head, position = node
                projections = {}
                for (kind, at), writers in inputs(node).items():
                    side = kind[0]
                    of_head = head if side == "q" else head * self.n_kv // self.n_heads
                    n = self.n_heads if side == "q" else self.n_kv
                    vector = stream(at, writers)[side][layer][at]
                    vector = vector.reshape(n, -1)[of_head]
                    projections.setdefault((layer, side), {})[at, of_head] = vector
                run = self._run(self.embedded[frozen], projections=projections)
                known[node] = run["z"][layer][position, self._slice(head)]
            return known[node]

        before, after = self.values[frozen], self.values[live]
        for (_, position), writers in inputs(None).items():
            value = self.read(stream(position, writers)["logits"])
            return float((value - before) / (after - before))
        return 0.0
