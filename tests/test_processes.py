"""Programs that tests start: as if fresh, and none is waited for in vain."""

import re
import signal
import sys

import pytest

from tests.processes import printed_by, started

pytestmark = pytest.mark.slow  # the server loads all libraries, and few other tests need it


@pytest.fixture
def program(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


def test_nothing_of_the_package_is_loaded_before_a_program_asks_for_it(program, tmp_path):
    path = program(
        "import sys, infoflow_lens.foundation as f; print(__name__, sys.argv[1:])\n"
        "print([m for m in sys.modules if m.startswith('infoflow_lens.') and m != f.__name__])"
    )
    assert printed_by(path, "a", "b", folder=tmp_path) == "__main__ ['a', 'b']\n[]\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs load what they need")
def test_the_libraries_are_there_and_know_that_there_is_no_network(program, tmp_path):
    path = program(
        "import sys, huggingface_hub.constants as c\n"
        "print('transformer_lens' in sys.modules, c.HF_HUB_OFFLINE)"
    )
    assert printed_by(path, folder=tmp_path) == "True True\n"


def test_a_program_that_ends_too_early_is_not_waited_for(program, tmp_path):
    path = program("import sys; sys.exit('no model')")
    with (
        started(path, folder=tmp_path) as running,
        pytest.raises(AssertionError, match="ended too early; no model"),
    ):
        running.wait_until(lambda: False)


def test_an_error_is_shown(program, tmp_path):
    with pytest.raises(AssertionError, match=re.escape("ZeroDivisionError: division by zero")):
        printed_by(program("1 / 0"), folder=tmp_path)


def test_signals_reach_a_program(program, tmp_path):
    path = program("import time; print('ready', flush=True); time.sleep(60)")
    for number, status in ((signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)):
        with started(path, folder=tmp_path) as running:
            running.wait_until(lambda running=running: "ready" in running.stdout)
            running.send_signal(number)
            assert running.wait(60) == status
            assert ("KeyboardInterrupt" in running.stderr) is (number == signal.SIGINT)
