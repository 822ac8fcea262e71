"""Whatever a user gives is right, or refused by name, within 5 seconds and 500 MB.

``python -m tests.fuzz --cases 2000 --seed 1`` draws so many cases in all and prints a table;
tests/test_fuzz.py draws a few of each kind.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from safetensors.torch import save_file
from typer.testing import CliRunner

from infoflow_lens import Architecture, InfoFlowError, build_model, load_any, load_model, save_model
from infoflow_lens.cli import app
from infoflow_lens.foundation.errors import InfoFlowWarning
from infoflow_lens.hooks.model.inputs import read_inputs
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.run import run_probing
from infoflow_lens.studies.papers import STUDIES
from infoflow_lens.tasks import list_tasks
from tests.reference import zoo
from tests.reference.data import read_data

SECONDS, MEGABYTES = 5.0, 500
N_CTX, D_VOCAB = 32, 50  # of the zoo's gpt2
SEEN: Counter[tuple[str, str]] = Counter()

numbers = st.one_of(
    st.integers(-3, 60),
    st.sampled_from([0, -1, 2**31, 2**63, 2**70, 10**12, -(10**12)]),
    st.floats(allow_nan=True, width=32),
)
plain = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=6))
anything = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
ids = st.lists(st.integers(0, D_VOCAB - 1), min_size=1, max_size=6)


@cache
def home() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz"))


@cache
def model_folder() -> Path:
    zoo.save("gpt2", home() / "gpt2")
    return home() / "gpt2"


@cache
def model() -> Any:
    return load_any(str(model_folder())).model


@cache
def finished() -> Path:
    """A folder of a finished run, and what it holds of an unfinished one."""
    from infoflow_lens.foundation.files import let_own
    from infoflow_lens.runs.checkpoint import Checkpoint
    from infoflow_lens.runs.folder import RunFolder

    out = home() / "finished"
    run_probing(out, probing(), progress=False)
    folder = RunFolder(out)
    with let_own(folder):
        Checkpoint(folder, ".detail.safetensors").save({"begun": torch.zeros(3)})
    return out


def probing() -> ProbingConfig:
    return ProbingConfig(
        str(model_folder()), "repeated", n=6, max_length=8, ranks=(1,), n_detail=2, shard=4,
        probes=("positions", "influence"),
    )  # fmt: skip


@contextmanager
def bounded(kind: str, case: Any) -> Iterator[None]:
    """The case takes less than 5 seconds and 500 MB, and fails by an InfoFlowError alone."""
    before, begun = _memory("VmRSS", reset=True), time.monotonic()
    try:
        yield
        SEEN[kind, "right"] += 1
    except InfoFlowError as error:
        if not str(error).strip():
            raise AssertionError(case) from error
        SEEN[kind, "refused"] += 1
    seconds, megabytes = time.monotonic() - begun, _memory("VmHWM") - before
    assert seconds < SECONDS * slack(), (seconds, case)
    assert megabytes < MEGABYTES, (megabytes, case)


def slack() -> float:
    """How many times the processors are wanted more often than they are there."""
    return max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def _memory(name: str, reset: bool = False) -> float:
    if sys.platform != "linux":
        return 0.0
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def command(kind: str, arguments: list[str]) -> None:
    """A command ends well, or with one line that says what is wrong."""
    with bounded(kind, arguments), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, arguments)
        expected = result.exception is None or isinstance(result.exception, SystemExit)
        assert expected, (arguments, result.exception)
        assert result.exit_code in (0, 1, 2), (arguments, result.exit_code)
        if result.exit_code:
            said = result.stderr.strip() or result.stdout.strip()
            assert said, arguments
            assert "Traceback" not in said, (arguments, said)
            raise InfoFlowError(said)


# Kinds of cases

rows = st.lists(
    st.dictionaries(
        st.sampled_from(["input_ids", "text", "tokens", "attention_mask", "other"]),
        st.one_of(anything, ids, st.lists(st.integers(0, 1), max_size=6)),
        max_size=3,
    ),
    max_size=4,
)
files = st.one_of(
    st.tuples(st.sampled_from(["jsonl", "json"]), rows),
    st.tuples(
        st.sampled_from(["txt", "json", "jsonl", "csv", "parquet", "pt", "npy", "safetensors"]),
        st.one_of(st.binary(max_size=200), st.text(max_size=80).map(str.encode)),
    ),
    st.tuples(
        st.sampled_from(["pt", "safetensors"]),
        st.tuples(
            st.lists(st.integers(0, 5), max_size=4),
            st.sampled_from(["int64", "int8", "float32", "bool", "complex64", "bfloat16"]),
            st.integers(-2, 60),
        ),
    ),
)


# Names of data that a library may take for a pattern or a chain, and what lies beside them.
NAMES = {
    "data": None, "run[1]": "run1", "a*": "ab", "q?": "qr", "zip::x": "zip", "d[1]/x": "d1/x",
    ".hidden": None, "dataset_info": None, "é" * 100: None, "~x": "x",
}  # fmt: skip


def data_file(case: tuple[str, Any], name: str, n: int | None, max_length: int | None) -> None:
    """A file of data: ids that the model takes, those of the file where they are well-formed."""
    suffix, content = case
    path = home() / "names" / f"{name}.{suffix}"
    beside = home() / "names" / f"{NAMES[name]}.{suffix}"
    for each in (path, beside):
        each.parent.mkdir(parents=True, exist_ok=True)
    if NAMES[name] is not None:
        beside.write_text('{"input_ids": [7, 7, 7, 7]}\n')
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, list):
        text = json.dumps(content) if suffix == "json" else "\n".join(map(json.dumps, content))
        path.write_text(text)
    else:
        shape, dtype, value = content
        made = torch.full(shape, value).to(getattr(torch, dtype))
        torch.save(made, path) if suffix == "pt" else save_file({"x": made}, path)
    with bounded("data files", case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read_data(model(), str(path), n=n, max_length=max_length)
        sequences = list(found.sequences())
        assert 1 <= len(sequences) <= (n or 10**9)
        for sequence in sequences:
            assert 1 <= len(sequence) <= min(N_CTX, max_length or N_CTX)
            assert sequence.dtype == torch.long
            assert 0 <= int(sequence.min()) <= int(sequence.max()) < D_VOCAB
        plain_ids = isinstance(content, list) and all(
            list(row) == ["input_ids"] and isinstance(row["input_ids"], list) for row in content
        )
        if plain_ids:
            expected = [row["input_ids"][:max_length] for row in content[:n]]
            assert [sequence.tolist() for sequence in sequences] == expected


tensors = st.builds(
    lambda shape, dtype, values: (
        torch.tensor(values)[: max(1, torch.Size(shape).numel())]
        .repeat(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()]
        .reshape(shape)
        .to(getattr(torch, dtype))
    ),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["int64", "int32", "float32", "bool", "complex64"]),
    st.lists(st.integers(-1, 3), min_size=1, max_size=4),
)


def ids_and_mask(given_ids: Any, mask: Any) -> None:
    """Ids and a mask, of any kind: the real ids, where they are well-formed."""
    with bounded("ids and masks", (given_ids, mask)):
        found = read_inputs(model(), given_ids, attention_mask=mask)
        if found.n_sequences is None:
            raise InfoFlowError("a loader, read later")
        sequences = [sequence.tolist() for sequence in found.sequences()]
        assert all(0 <= i < D_VOCAB for sequence in sequences for i in sequence)
        listed = given_ids.tolist() if isinstance(given_ids, torch.Tensor) else given_ids
        if mask is None and all(isinstance(row, list) for row in listed):
            assert sequences == [[int(i) for i in row] for row in listed]
        elif mask is not None:
            kept = [
                [int(i) for i, real in zip(row, reals, strict=True) if real]
                for row, reals in zip(listed, mask, strict=True)
            ]
            assert sequences == kept


FIELDS = [name for name in vars(probing()) if name not in ("model", "data")]


def settings_of_a_run(values: dict[str, Any]) -> None:
    """Settings of a probe run, of any kind."""
    with bounded("settings", values):
        made = ProbingConfig("m", "d", **values)
        assert made.batch_size >= 1
        assert made.ranks == tuple(range(1, len(made.ranks) + 1))


HF_FIELDS = [
    "n_head", "n_embd", "n_layer", "vocab_size", "n_positions", "n_inner", "architectures",
    "activation_function", "model_type", "layer_norm_epsilon", "tie_word_embeddings", "auto_map",
    "dtype", "bos_token_id", "pad_token_id", "quantization_config", "rope_scaling", "backbone",
    "text_config", "_attn_implementation", "_name_or_path",
]  # fmt: skip


def config_of_a_model(changes: dict[str, Any]) -> None:
    """config.json of a Hugging Face folder, with fields of any kind."""
    folder = home() / "changed"
    shutil.copytree(model_folder(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    tried: list[Any] = []
    with (
        bounded("configs of models", changes),
        warnings.catch_warnings(),
        mock.patch("socket.getaddrinfo", tried.append),
        mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", False),
    ):
        warnings.simplefilter("ignore")
        load_any(str(folder))
    assert tried == [], changes


@cache
def our_model() -> Path:
    folder = home() / "ours"
    save_model(build_model(Architecture(n_heads=(2, 1), d_model=4, d_token=3, n_tokens=5)), folder)
    return folder


def architecture_of_a_model(changes: dict[str, Any]) -> None:
    """architecture.json of a folder of ours, with fields of any kind."""
    folder = home() / "ours-changed"
    shutil.copytree(our_model(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "architecture.json").read_text())
    (folder / "architecture.json").write_text(json.dumps({**config, **changes}))
    with bounded("architectures of models", changes):
        assert load_model(folder).architecture.d_model == 4


def spoiled(path: Path, how: str, place: float, other: bytes) -> None:
    """Spoil one file."""
    content = path.read_bytes()
    at = int(place * max(0, len(content) - 1))
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[:at])
    elif how == "flipped":
        flipped = bytes(byte ^ 4 for byte in content[at : at + 1])  # none of an empty file
        path.write_bytes(content[:at] + flipped + content[at + 1 :])
    elif how == "other bytes":
        path.write_bytes(other)
    elif how == "not UTF-8":
        path.write_bytes(b"\xff\xfe" + content)
    elif how == "another shape":
        path.write_text(json.dumps(["x", {"config": None}]))
    elif how == "a pickle":
        torch.save({"callable": print}, path)
    elif how == "a folder":
        path.unlink()
        path.mkdir()


SPOILS = (
    "missing", "empty", "cut", "flipped", "other bytes", "not UTF-8", "another shape", "a pickle",
    "a folder",
)  # fmt: skip
OF_A_RUN = (
    "manifest.jsonl", "positions.json", "positions.safetensors", "positions/000001.json",
    "positions/000001.safetensors", "influence.json",
    "influence.safetensors", "influence_attended.json", "influence_attended.safetensors",
    "influence_positions.json", "inputs/sequences.arrow", "inputs/sequences.json",
    ".detail.safetensors",
)  # fmt: skip


def spoiled_folder(name: str, how: str, place: float, other: bytes) -> None:
    """A file of a finished run is spoiled: refused, or the numbers of an undisturbed run."""
    out = home() / "spoiled"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(finished(), out)
    spoiled(out / name, how, place, other)
    with bounded("spoiled folders", (name, how, place)), warnings.catch_warnings():
        warnings.simplefilter("ignore", InfoFlowWarning)
        run_probing(out, probing(), progress=False)
        for table in ("positions.csv", "agreement.csv", "coverage_curve.csv"):
            assert (out / table).read_bytes() == (finished() / table).read_bytes()


words = st.one_of(
    st.sampled_from(
        ["", "-1", "0", "1", "2", "3,2", "1,1", "a", "nan", "1e9", "99999999", "inf", "--",
         "[red]x", "gpt2", "d_retrieval", "all", "/nowhere", "x\x00y", "ä", "1,2", "repeated",
         "cpu", "meta"]
    ),
    st.text(max_size=6),
)  # fmt: skip
OPTIONS = {
    "estimate": ["--heads", "--like", "--tokens", "--components", "--d-token", "--positions",
                 "--json", "--width", "--eps"],
    "design": ["--tokens", "--components", "--d-token", "--max-heads", "--max-layers", "--json"],
    "certify": ["--out", "--json", "--check", "--heads"],
    "inspect": ["--device", "--dtype", "--backend", "--json"],
    "tasks": ["--json"],
    "study": ["--preset", "--seeds", "--jobs", "--device", "--list"],
    "probe": ["--data", "--probes", "--ranks", "--n", "--max-length", "--without", "--influence",
              "--n-detail", "--sketch", "--metric", "--threshold", "--batch-size", "--seed",
              "--device", "--dtype", "--backend", "--column"],
    "constructions": [],
}  # fmt: skip
lines = st.sampled_from(sorted(OPTIONS)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.one_of(words, st.sampled_from([*list_tasks(), "head_counts"])),
        st.lists(st.tuples(st.sampled_from(OPTIONS[name] or ["--x"]), words), max_size=3),
    )
)


def command_line(case: tuple[str, str, list[tuple[str, str]]]) -> None:
    """A command with options and values of any kind."""
    name, first, options = case
    if name in ("probe", "inspect") and first not in ("", "/nowhere"):
        first = str(model_folder())
    if name == "study" and first in STUDIES:
        first = "nothing"  # a study that is well asked for trains
    arguments = [name, first, *(part for option in options for part in option)]
    if name == "probe":
        shutil.rmtree(home() / "out", ignore_errors=True)
        arguments += ["--out", str(home() / "out"), "--quiet", "--probes", "positions", "--n", "3"]
        arguments += ["--data", "repeated"]
    command("command lines", arguments)


hostile = st.sampled_from(
    ["owner/chosen", {"model_type": "dpt", "backbone": "owner/chosen"}, "hf-hub:owner/chosen"]
)
values = st.one_of(
    anything, hostile, st.sampled_from([10**7, 3000, [3000], [2] * 3000, [10**9, 1], "dpt", "detr"])
)
KINDS: dict[str, tuple[float, Callable[[Any], Callable[[], None]]]] = {
    # share of all cases, and how a test is made of it
    "data files": (
        0.3,
        given(
            files, st.sampled_from(list(NAMES)), st.none() | st.integers(1, 3),
            st.none() | st.integers(1, 40),
        ),
    ),
    "ids and masks": (
        0.25,
        given(
            st.one_of(anything, st.lists(ids, max_size=3), tensors),
            st.one_of(
                st.none(), tensors, anything, st.lists(st.lists(st.integers(0, 1), max_size=6))
            ),
        ),
    ),
    "settings": (0.15, given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3))),
    "configs of models": (
        0.1,
        given(st.dictionaries(st.sampled_from(HF_FIELDS), values, min_size=1, max_size=2)),
    ),
    "architectures of models": (
        0.08,
        given(
            st.dictionaries(
                st.sampled_from(
                    ["n_heads", "d_model", "d_token", "n_tokens", "d_head", "d_mlp", "d_output",
                     "kind", "fixed", "act_fn", "attn_scale", "d_encoder", "new"]
                ),
                values,
                min_size=1,
                max_size=2,
            )
        ),
    ),
    "spoiled folders": (
        0.04,
        given(
            st.sampled_from(OF_A_RUN), st.sampled_from(SPOILS), st.floats(0, 1), st.binary()
        ),
    ),
    "command lines": (0.08, given(lines)),
}  # fmt: skip
RUN: dict[str, Callable[..., None]] = {
    "data files": data_file,
    "ids and masks": ids_and_mask,
    "settings": settings_of_a_run,
    "configs of models": config_of_a_model,
    "architectures of models": architecture_of_a_model,
    "spoiled folders": spoiled_folder,
    "command lines": command_line,
}


def check(kind: str, n: int, derandomize: bool = False, drawn_from: int | None = None) -> None:
    """Draw `n` cases of a kind, from a seed where one is given.

    Raises:
        AssertionError: with the smallest case that is neither right nor refused within bounds.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    model(), finished(), our_model()  # made before time is taken
    CliRunner().invoke(app, ["inspect", str(model_folder())])
    profile = settings(
        max_examples=n, deadline=None, derandomize=derandomize, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    draw = KINDS[kind][1](RUN[kind])
    profile(draw if drawn_from is None else seed(drawn_from)(draw))()


def main() -> None:
    """Draw cases of every kind and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--kind", choices=KINDS, default=None)
    parser.add_argument("--seed", type=int, default=None)
    chosen = parser.parse_args()
    failed = []
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        for kind, (share, _) in KINDS.items():
            if chosen.kind in (None, kind):
                try:
                    check(kind, max(1, round(share * chosen.cases)), drawn_from=chosen.seed)
                except BaseException as error:
                    failed.append((kind, error))
    for kind in RUN:
        sys.stdout.write(
            f"{kind:25} right {SEEN[kind, 'right']:5} refused {SEEN[kind, 'refused']:5}\n"
        )
    for kind, error in failed:
        sys.stdout.write(f"FAILED {kind}: {type(error).__name__}: {str(error)[:1500]}\n")
        import traceback

        sys.stdout.write("".join(traceback.format_exception(error)[-8:])[-3000:])
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
