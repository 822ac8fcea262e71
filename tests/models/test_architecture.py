"""An architecture is checked when it is written down."""

import json

import pytest

from infoflow_lens import Architecture, InfoFlowError

SIZES = {"d_model": 12, "d_token": 3, "n_tokens": 5}


def test_heads_share_the_width_unless_told_otherwise():
    assert Architecture(n_heads=(4, 1), **SIZES).head_dimensions == (3, 12)
    assert Architecture(n_heads=(5, 1), d_head=(7, 2), **SIZES).head_dimensions == (7, 2)


def test_survives_json():
    architecture = Architecture(n_heads=(5, 1), d_head=(7, 2), attn_scale=2.0, **SIZES)
    text = json.dumps(architecture.to_dict())
    assert Architecture.from_dict(json.loads(text)) == architecture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": (5, 1)}, r"n_heads\[0\] is 5, which does not divide d_model 12"),
        ({"n_heads": ()}, "n_heads are"),
        ({"n_heads": (4, 0)}, "one for each layer"),
        ({"d_head": (3,)}, "d_head has 1 entries for 2 layers"),
        ({"act_fn": "swish"}, "act_fn is 'swish': expected one of tanh"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(InfoFlowError, match=message):
        Architecture(**({"n_heads": (4, 1)} | SIZES | changes))


def test_fields_of_a_file_that_are_unknown_or_missing_are_named():
    with pytest.raises(InfoFlowError, match=r"has no field 'head': .*did you mean 'd_head'"):
        Architecture.from_dict({"head": (1,)} | SIZES)
    with pytest.raises(InfoFlowError, match="lacks n_heads"):
        Architecture.from_dict(SIZES)
