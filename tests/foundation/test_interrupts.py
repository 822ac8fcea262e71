"""Cleaning up is not cut off by Ctrl-C."""

import pytest

from infoflow_lens.foundation.interrupts import insist


def test_what_is_cut_off_is_done_again_and_the_interrupt_is_told():
    kept = {"a", "b"}
    n_calls = 0

    def clean():
        nonlocal n_calls
        n_calls += 1
        kept.discard("a")
        if n_calls == 1:
            raise KeyboardInterrupt
        kept.discard("b")

    with pytest.raises(KeyboardInterrupt):
        insist(clean)
    assert not kept


def test_what_is_not_cut_off_is_done_once():
    calls = []
    insist(lambda: calls.append(1))
    assert calls == [1]
