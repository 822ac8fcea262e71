"""Steps end before a run is stopped."""

import os
import signal

import pytest

from infoflow_lens.foundation.processes import defer_interrupts


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("usual", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_waits_for_the_end_of_a_step_also_behind_nohup(usual):
    """A shell that starts a command with & has it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, usual)
    try:
        with pytest.raises(KeyboardInterrupt), defer_interrupts() as stop_if_asked:  # noqa: PT012
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGTERM)
            stop_if_asked()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is usual
    finally:
        signal.signal(signal.SIGINT, before)
