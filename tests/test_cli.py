"""The command line: quick, clear, and clean when stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from infoflow_lens.cli import app

PROGRAM = [sys.executable, "-W", "ignore", "-m", "infoflow_lens.cli"]


def test_help_loads_no_model_library():
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from infoflow_lens.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0 and 'demo' in result.output\n"
        "print([m for m in ('torch', 'transformer_lens', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("infoflow-lens 0.")


def test_a_bad_output_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file"), "--quiet"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot write to the output folder")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999"])
def test_a_bad_seed_is_one_line(tmp_path, seed):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--seed", seed, "--quiet"])
    assert result.exit_code == 2
    assert f"seed is {seed}" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_is_a_clean_stop(tmp_path):
    process = subprocess.Popen(
        [*PROGRAM, "demo", "--out", str(tmp_path), "--quiet"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "training" / "training.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert stderr.startswith("stopped: training stopped after epoch")
    assert "Traceback" not in stderr
