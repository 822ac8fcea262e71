"""Settings are declared once, as annotations, and checked strictly."""

from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from annotated_types import Ge
from hypothesis import given
from hypothesis import strategies as st

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import (
    Count,
    Positions,
    Ranks,
    Remedy,
    Seed,
    Share,
    check,
    check_by_layer,
    checked,
    settings,
)


@settings
class Example:
    n: Count = 3
    share: Share = 0.5
    spread: bool = False
    ranks: Ranks = (1, 2)
    mode: Literal["fit", "evaluate"] = "fit"
    maybe: Count | None = None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", value) for value in (0, -1, True, 2.0, "3", None, np.float64(2), [1])],
        *[("share", value) for value in ("0.1", -0.1, 1.1, float("nan"), float("inf"), True)],
        *[("spread", value) for value in ("no", 0, 1, None, "True")],
        *[("ranks", value) for value in ((), (0,), (1, 1), "12", 3, (1, 2.5), (True,))],
        *[("mode", value) for value in ("fitt", 3, None)],
        *[("maybe", value) for value in (0, "1", True)],
    ],
)
def test_a_value_of_another_type_or_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InfoFlowError) as caught:
        Example(**{name: value})
    assert str(caught.value).startswith((f"{name} is ", f"{name} are "))
    assert repr(value) in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16, torch.tensor])
def test_numbers_of_numpy_and_torch_count_as_what_they_hold(kind: Any) -> None:
    made = Example(n=kind(8), ranks=[kind(3), kind(1)])  # type: ignore[arg-type]
    assert made == Example(n=8, ranks=(3, 1))
    assert type(made.n) is int


def test_arrays_lists_and_ranges_count_as_tuples() -> None:
    ways: list[Any] = [np.arange(1, 4), torch.arange(1, 4), [1, 2, 3], range(1, 4)]
    assert {Example(ranks=way).ranks for way in ways} == {(1, 2, 3)}


def test_a_misspelt_choice_is_told_the_one_that_was_meant() -> None:
    with pytest.raises(InfoFlowError, match="did you mean 'evaluate'"):
        Example(mode="evaluat")  # type: ignore[arg-type]


@given(st.integers(), st.integers())
def test_ranges_hold_exactly(value: int, least: int) -> None:
    if value >= least:
        assert check(value, Annotated[int, Ge(least)], "n") == value
    else:
        with pytest.raises(InfoFlowError, match=f"at least {least}"):
            check(value, Annotated[int, Ge(least)], "n")


def test_a_remedy_ends_the_error() -> None:
    with pytest.raises(InfoFlowError, match="use fewer"):
        check("x", Annotated[int, Remedy("use fewer")], "n")


def test_arguments_of_a_function_are_checked_and_others_left_alone() -> None:
    @checked
    def draw(model: torch.nn.Module, n: Count, *rest: int, seed: Seed = 0, **more: Any) -> Any:
        return model, n, seed, rest, more

    model: Any = object()
    assert draw(model, np.int64(2), 7, 8, seed=1, x="y") == (model, 2, 1, (7, 8), {"x": "y"})
    with pytest.raises(InfoFlowError, match="seed is -1"):
        draw(model, 2, seed=-1)
    with pytest.raises(TypeError, match="missing"):
        draw(model)  # type: ignore[call-arg]


def test_a_class_adds_what_holds_between_its_fields() -> None:
    @settings
    class Window:
        length: Count
        step: Count = 1

        def __post_init__(self) -> None:
            if self.step > self.length:
                raise InfoFlowError(f"step is {self.step}: expected at most length {self.length}")

    assert Window(np.int64(3)).length == 3  # type: ignore[arg-type]
    with pytest.raises(InfoFlowError, match="step is 4"):
        Window(3, 4)


def test_positions_may_be_none_at_all() -> None:
    assert check((), Positions, "without") == ()


def test_one_number_for_all_layers_or_one_for_each():
    assert check_by_layer(3, "roles", 2) == (3, 3)
    assert check_by_layer([3, 4], "roles", 2) == (3, 4)
    assert check_by_layer(np.array([3, 4]), "roles", 2) == (3, 4)


@pytest.mark.parametrize("given", [0, (3,), (3, 0), (3, 1.5), 2.0, None, True, "32"])
def test_other_numbers_are_refused_by_name(given):
    with pytest.raises(InfoFlowError, match=r"width is .*: expected .* each of 2 layers"):
        check_by_layer(given, "width", 2)
