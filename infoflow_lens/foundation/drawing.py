"""Random numbers of modules, drawn from a generator of one's own.

Modules that draw without a generator, as dropout and initialisations do, take PyTorch's global one,
which all threads share. Here every such operation of a block, in this thread, is given a generator.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Seed, checked

_aten = torch.ops.aten


class SeededRandom(TorchDispatchMode):
    """What the operations of a block draw in this thread comes from a seed of its own.

    On a CPU the numbers are those that the global generator would give from the same seed; its
    state is left alone. A block costs time with every operation.

    Attributes:
        n_drawn: how many operations have drawn so far.

    Raises:
        InfoFlowError: from an operation that draws and takes no generator.
    """

    @checked
    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.n_drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # only operations that draw; those with a generator are in the caller's hands
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator"):
            return func(*args, **kwargs)
        if _device_of(args, kwargs).type == "meta":  # where there are no numbers
            return func(*args, **kwargs)
        self.n_drawn += 1
        if func in _WITHOUT_GENERATOR:
            return _WITHOUT_GENERATOR[func](self, *args, **kwargs)
        if not _draws_at_all(func, args, kwargs):
            return func(*args, **kwargs)
        # without such an argument: as smaller operations, or by another overload
        if not any(argument.name == "generator" for argument in func._schema.arguments):
            func_with = getattr(func.overloadpacket, "generator", None)
            with self:  # what is made of other operations
                made = func.decompose(*args, **kwargs) if func_with is None else NotImplemented
            if made is not NotImplemented:
                return made
            if func_with is None:
                raise InfoFlowError(
                    f"the model draws random numbers by {func}, which takes no generator: expected "
                    "one that does, so that a seed gives the same numbers; use other operations, "
                    "such as nn.Dropout"
                )
            func = func_with
        return func(*args, **{**kwargs, "generator": self.generator(_device_of(args, kwargs))})

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    given = next((part for part in args if isinstance(part, Tensor)), None)
    device = given.device if given is not None else torch.device(kwargs.get("device") or "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _draws_at_all(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a call draws numbers; PyTorch marks attention as random even if dropout is 0."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return not any(name in given and not given[name] for name in ("dropout_p", "dropout"))


def _dropout(
    drawing: SeededRandom, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    """nn.Dropout on accelerators; on a CPU it is made of operations that take a generator."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _fill_like(drawing, x, "bernoulli_", 1 - p).bool()
    return x * kept / (1 - p) if p < 1 else x * 0, kept


def _fill_like(
    drawing: SeededRandom, like: Tensor, method: str, *numbers: float, **kwargs: Any
) -> Tensor:
    empty = torch.empty_like(like, **kwargs)
    generator = drawing.generator(_device_of((empty,), {}))
    filled: Tensor = getattr(empty, method)(*numbers, generator=generator)
    return filled


def _like(how: str, *numbers: float) -> Any:
    def draw(drawing: SeededRandom, like: Tensor, **kwargs: Any) -> Tensor:
        return _fill_like(drawing, like, how, *numbers, **kwargs)

    return draw


_WITHOUT_GENERATOR = {
    _aten.native_dropout.default: _dropout,
    _aten.rand_like.default: _like("uniform_"),
    _aten.randn_like.default: _like("normal_"),
}
