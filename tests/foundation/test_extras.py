"""What only some work needs is asked for by name, before the work starts."""

import sys

import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.flows.serve import AnswerServer
from infoflow_lens.foundation.packages import import_optional
from infoflow_lens.studies.certificates.separability import dependence, one_layer_certificate
from infoflow_lens.studies.sweep import run_study
from tests.studies.studies_for_tests import Squares


@pytest.fixture
def without(monkeypatch):
    """As if a package were not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def test_a_package_that_is_there_is_given():
    assert import_optional("json", "studies", "a test") is sys.modules["json"]


@pytest.mark.parametrize("asked", [one_layer_certificate, dependence])
def test_certificates_name_their_extra(without, asked):
    without("flint")
    with pytest.raises(InfoFlowError, match=r'pip install "infoflow-lens\[certificates\]"'):
        asked(([[0, 1], [1, 1]], [0, 1]))


@pytest.mark.parametrize(
    ("package", "settings", "extra"),
    [
        ("joblib", {"jobs": 2}, "studies"),
        ("distributed", {"scheduler": "tcp://127.0.0.1:1"}, "cluster"),
    ],
)
def test_studies_name_their_extra_and_leave_nothing_behind(
    without, package, settings, extra, tmp_path
):
    without(package)
    with pytest.raises(InfoFlowError, match=rf'pip install "infoflow-lens\[{extra}\]"'):
        run_study(Squares(), tmp_path / "study", preset="smoke", **settings)
    assert not (tmp_path / "study").exists()


def test_a_server_names_its_extra(without):
    without("tornado.web")
    with pytest.raises(InfoFlowError, match=r'pip install "infoflow-lens\[serve\]"'):
        AnswerServer(lambda form: None)
