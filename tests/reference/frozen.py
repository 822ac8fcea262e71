"""What HookedTransformer of TransformerLens 3.9 gives, kept in files, for every later version.

``frozen.safetensors`` has the values, in full: weights by seed, outputs, gradients, and ten steps
of training, for architectures and constructions of every kind, in float32 and float64.
``frozen.json`` has what wrote them, and for each case the names of parameters and hook points in
their order, the losses, and hashes of everything that a forward pass shows. Rewrite them with::

    python -m tests.reference.frozen

which TransformerLens 3.9 alone may do.

When are bits equal? PyTorch leaves the order of a sum, and the last bit of exp or tanh, to the
libraries of the processor. So the same program gives the same bits only where the arithmetic is the
same: same PyTorch, same vector instructions, same number of threads (one, here). Whether it is, is
measured and not guessed: :func:`arithmetic` hashes plain PyTorch operations, without any
TransformerLens, in the sizes of the cases. Where it equals what ``frozen.json`` says, every bit is
compared. Elsewhere numbers are compared within TOLERANCES; where seeds give other weights, too, the
rest starts from the weights in the file. Weights after training are left out there: Adam divides a
gradient by its own size, so that a gradient that is zero but for rounding (as that of a key's bias
is, since softmax does not see it) becomes a full step in either direction. Losses and outputs,
which do not depend on those, are compared.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from infoflow_lens import Architecture, build_model, train
from infoflow_lens.foundation.record import fingerprint
from infoflow_lens.models.host import build_token_model
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.training import TrainingConfig

HERE = Path(__file__).parent
VALUES, RECORD = HERE / "frozen.safetensors", HERE / "frozen.json"
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# where the arithmetic differs: of the largest entry of an output, or of all gradients
TOLERANCES = {"float32": 1e-3, "float64": 1e-9}
WEIGHT_TOLERANCE = 1e-6  # initialisation is in float32

_VECTORS = {"n_heads": (2, 3), "d_head": (3, 2), "d_model": 7, "d_token": 2, "n_tokens": 5}
_TOKENS = {
    "n_layers": 2,
    "n_heads": (2, 1),
    "d_head": 3,
    "d_model": 13,
    "n_tokens": 5,
    "d_vocab": 8,
    "d_output": 4,
}


def _vectors(**changes: object) -> Callable[[], nn.Module]:
    return lambda: build_model(Architecture(**{**_VECTORS, "d_mlp": 6, **changes}), seed=11)


def _tokens(**changes: object) -> Callable[[], nn.Module]:
    return lambda: build_token_model(**{**_TOKENS, "seed": 11, **changes})


def _construction(name: str, **sizes: object) -> Callable[[], nn.Module]:
    return lambda: build_construction(name, **sizes)[0]


TRAINED = {
    "plain": _vectors(),
    "positions and layer norm": _vectors(positional_embedding="learned", normalization="LN"),
    "tanh, two-layer encoder, a scale": _vectors(act_fn="tanh", d_encoder=4, attn_scale=1.3),
    "relu, CLS as a key, Xavier": _vectors(
        act_fn="relu", cls_is_key=True, init_mode="xavier_uniform"
    ),
    "square, Kaiming, two outputs": _vectors(
        act_fn="square", init_mode="kaiming_normal", d_output=2
    ),
    "attention only, three layers": _vectors(d_mlp=0, n_heads=(1, 3, 2), d_head=(4, 2, 3)),
    "one layer, Xavier normal": _vectors(n_heads=(4,), d_head=None, d_model=8,
                                         init_mode="xavier_normal"),
    "Kaiming uniform, equal heads": _vectors(n_heads=(2, 2), d_head=None, d_model=6,
                                             init_mode="kaiming_uniform"),
    "ReLU attention over vectors": _vectors(attention="relu"),
    "tokens, ReLU attention": _tokens(),
    "tokens, softmax": _tokens(attention="softmax"),
    "tokens, one-hot": _tokens(one_hot=True, n_layers=1, n_heads=2),
    "tokens, the start of Chen and Zou": _tokens(init="chen_zou", d_head=13),
}  # fmt: skip
CONSTRUCTED = {
    "d_retrieval": _construction("d_retrieval", n_tokens=5),
    "d_retrieval, hard maximum": _construction(
        "d_retrieval", n_tokens=5, attention="hardmax", outer="square_sum"
    ),
    "depth_separation": _construction("depth_separation", n_tokens=4),
    "kth_largest": _construction("kth_largest", n_tokens=4),
    "in_context_qa": _construction("in_context_qa", n_pairs=2, n_questions=3, n_answers=2),
    "in_context_qa_softmax": _construction(
        "in_context_qa_softmax", n_pairs=2, n_questions=3, n_answers=2
    ),
}
CASES = TRAINED | CONSTRUCTED


def inputs(model: nn.Module, n: int, dtype: torch.dtype) -> Tensor:
    """Token ids, or vectors of multiples of 1/8, which are the same numbers everywhere."""
    generator = torch.Generator().manual_seed(5)
    sizes = model.architecture
    if not getattr(model, "reads_vectors", False):
        return torch.randint(sizes.d_vocab, (n, sizes.n_tokens), generator=generator)
    shape = (n, sizes.n_tokens, sizes.d_token)
    return (torch.randint(-16, 17, shape, generator=generator) / 8).to(dtype)


def _targets(model: nn.Module, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    sizes = model.architecture
    if not x.is_floating_point():
        return torch.randint(sizes.d_output, (len(x),), generator=generator)
    noise = torch.randint(-8, 9, (len(x), sizes.d_output), generator=generator) / 8
    return x.amax(dim=1)[:, :1] + noise.to(x.dtype) / 4


@dataclass(frozen=True)
class Shown:
    """What a case shows in one precision.

    Attributes:
        structure: names, in their order, of parameters (and which are fixed), of the state with its
            shapes, of hook points, and of activations as they are cached.
        hashes: of the weights and of all activations.
        losses: of the ten steps; empty for a construction.
        tensors: by part ("weights", "output", "gradients", "trained", "trained output"), then by
            parameter.
    """

    structure: dict[str, list[str]]
    hashes: dict[str, str]
    losses: list[float]
    tensors: dict[str, dict[str, Tensor]]


def shown(
    name: str,
    precision: str,
    start: dict[str, Tensor] | None = None,
    host: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Shown:
    """What a case of CASES shows now.

    Args:
        name: of the case.
        precision: of DTYPES.
        start: weights to start from, instead of those of the seed.
        host: another model of the same function, from the hosted one.
    """
    with _one_thread():
        model, dtype = host(CASES[name]()), DTYPES[precision]
        weights = {label: p.detach().clone() for label, p in model.named_parameters()}
        if start is not None:
            model.load_state_dict(start, strict=False)
        model.to(dtype, print_details=False)
        x = inputs(model, 6, dtype)
        output, cache = model.run_with_cache(x)
        output.square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        structure = {
            "parameters": list(weights),
            "fixed": [label for label, p in model.named_parameters() if not p.requires_grad],
            "state": [f"{label} {list(v.shape)}" for label, v in model.state_dict().items()],
            "hook_points": list(model.hook_dict),
            "activations": list(cache.keys()),
        }
        hashes = {"weights": fingerprint(weights), "activations": fingerprint(dict(cache.items()))}
        tensors = {"output": {"": output.detach()}, "weights": weights, "gradients": gradients}
        losses: list[float] = []
        if name in TRAINED:
            losses, tensors["trained"], after = _ten_steps(model, dtype)
            tensors["trained output"] = {"": after}
    return Shown(structure, hashes, losses, tensors)


def _ten_steps(
    model: nn.Module, dtype: torch.dtype
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Two epochs of five steps of AdamW: the losses, the weights and the output after them."""
    model.zero_grad()
    x = inputs(model, 40, dtype)
    data = (x, _targets(model, x))
    config = TrainingConfig(epochs=2, batch_size=8, lr=1e-2, seed=3)
    result = train(model, data, data, config, progress=False)
    measured = ("train_loss", "validation_nmse", "validation_loss")
    losses = [float(row[key]) for row in result.history for key in measured if key in row]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return losses, weights, model(inputs(model, 6, dtype)).detach()


def arithmetic() -> dict[str, str]:
    """Hashes of what plain operations of PyTorch give on this machine, with one thread.

    "seeds" are those of random numbers; "float32" and "float64" those of products, sums, softmax,
    activations and their gradients, in sizes as the cases have them.
    """
    hashes = {}
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        drawn = [torch.empty(n, 7).normal_(std=0.3) for n in range(1, 20)]
        drawn += [torch.empty(n, 7).uniform_(-0.3, 0.4) for n in range(1, 20)]
        hashes["seeds"] = _hash(drawn)
        for label, dtype in DTYPES.items():
            results = []
            for rows, inner, outer in _sizes():
                x, w = (_numbers(shape, dtype) for shape in ((6, rows, inner), (inner, outer)))
                b = _numbers((outer,), dtype).requires_grad_()
                x.requires_grad_(), w.requires_grad_()
                y = functional.linear(x, w.T.contiguous(), b)
                y = y + torch.addmm(b, x.view(-1, inner), w).view(y.shape) + x @ w
                pattern = (y @ y.transpose(1, 2) / inner**0.5).softmax(dim=-1)
                z = pattern @ y
                z = z / (z.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
                z = functional.gelu(z) + torch.tanh(z) + functional.cross_entropy(z[0], z[1] ** 2)
                z.square().sum().backward()
                results += [y, pattern, z, x.grad, w.grad, b.grad]
            hashes[label] = _hash(results)
    return hashes


def _sizes() -> Iterator[tuple[int, int, int]]:
    for rows in (1, 4, 5, 6):
        for inner, outer in ((2, 7), (7, 6), (6, 7), (13, 13), (13, 4), (8, 20), (36, 17), (3, 1)):
            yield rows, inner, outer


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers whose products and sums must be rounded."""
    return (torch.arange(prod(shape)).view(shape).mul(37).remainder(101).to(dtype) - 50) / 33


def _hash(tensors: list[Tensor]) -> str:
    return fingerprint({str(index): tensor for index, tensor in enumerate(tensors)})


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def record() -> dict:
    """``frozen.json``."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def frozen(name: str, precision: str) -> Shown:
    """What a case of CASES showed when the files were written."""
    case = record()["cases"][name]
    parts = case[precision]["parts"]
    tensors: dict[str, dict[str, Tensor]] = {}
    with safe_open(VALUES, "pt") as file:
        for part, shapes in parts.items():
            # weights are drawn in float32 and kept once
            drawn = "float32" if part == "weights" else precision
            pieces = file.get_tensor(f"{name}/{drawn}/{part}").split(
                list(map(prod, shapes.values()))
            )
            tensors[part] = {
                label: piece.view(shape)
                for (label, shape), piece in zip(shapes.items(), pieces, strict=True)
            }
    return Shown(case["structure"], case[precision]["hashes"], case[precision]["losses"], tensors)


def difference(name: str, found: Tensor, kept: Tensor) -> str:
    """How two tensors differ, in words, for whoever has to find out why."""
    if found.shape != kept.shape or found.dtype != kept.dtype:
        return f"{name} is {found.dtype} {list(found.shape)}, was {kept.dtype} {list(kept.shape)}"
    apart = (found - kept).abs()
    largest = int(apart.argmax())
    return (
        f"{name}: {int((found != kept).sum())} of {found.numel()} entries differ, by at most "
        f"{float(apart.max()):.3g}; entry {largest} is {float(found.flatten()[largest])!r}, was "
        f"{float(kept.flatten()[largest])!r}"
    )


def write() -> None:
    """Write both files from HookedTransformer of TransformerLens 3.9."""
    installed = version("transformer-lens")
    if not installed.startswith("3.9."):
        raise SystemExit(f"transformer-lens is {installed}: expected 3.9, which the files are of")
    from tests.reference.hooked_transformer import twin_of

    tensors: dict[str, Tensor] = {}
    cases: dict[str, Any] = {}
    for name in CASES:
        for precision in DTYPES:
            found = shown(name, precision, host=twin_of)
            case = cases.setdefault(name, {"structure": found.structure})
            assert case["structure"] == found.structure
            case[precision] = {
                "hashes": found.hashes,
                "losses": found.losses,
                "parts": {
                    part: {label: list(value.shape) for label, value in values.items()}
                    for part, values in found.tensors.items()
                },
            }
            for part, values in found.tensors.items():
                if part != "weights" or precision == "float32":
                    flat = torch.cat([value.flatten() for value in values.values()])
                    tensors[f"{name}/{precision}/{part}"] = flat
    VALUES.write_bytes(save(tensors))
    written_with = {
        "transformer-lens": installed,
        "torch": version("torch"),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    text = {"written_with": written_with, "arithmetic": arithmetic(), "cases": cases}
    RECORD.write_text(json.dumps(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.filterwarnings("error")
    write()
