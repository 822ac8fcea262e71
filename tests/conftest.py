"""Models and inputs that many tests use; every size is a different number."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for scripts that tests start, before torch loads

import pytest
import torch
from hypothesis import settings

from infoflow_lens.models.architecture import Architecture
from tests.processes import server
from tests.reference.copies import copied

torch.set_num_threads(1)  # the models are small, and tests run in parallel
os.fsync = lambda descriptor: None  # it waits for a disk, and no test takes the power away
# Temporary files lie in memory where it has room: tests make thousands of folders, and a disk may
# take milliseconds to remove each.
_MEMORY = "/dev/shm"
if (
    "TMPDIR" not in os.environ
    and os.access(_MEMORY, os.W_OK)
    and shutil.disk_usage(_MEMORY).free > 2 << 30
):
    os.environ["TMPDIR"] = _MEMORY  # also for programs that tests start
    tempfile.tempdir = None  # what was asked for before is asked for again

# Shared and noisy machines: examples may be slow without anything being wrong.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")

N_TOKENS, D_TOKEN, D_MODEL, D_MLP = 7, 3, 30, 11
HEADS, D_HEAD = (2, 5), (13, 6)


@pytest.fixture
def architecture() -> Architecture:
    return Architecture(
        n_heads=HEADS,
        d_head=D_HEAD,
        d_model=D_MODEL,
        d_token=D_TOKEN,
        n_tokens=N_TOKENS,
        d_mlp=D_MLP,
        attn_scale=1.0,
    )


@pytest.fixture
def model(architecture):
    from infoflow_lens.models.host import build_model

    return build_model(architecture, seed=5)


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(23, N_TOKENS, D_TOKEN, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def token_model():
    """A causal model over token ids, as a user would bring it."""
    return make_token_model()


def redraw_weights(model, seed, scale=1.0):
    """The model with other, larger matrices, so that its heads are not all alike."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


@copied
def make_token_model(tokenizer=None, **changes):
    """A HookedTransformer where TransformerLens has it, else a native bridge.

    A native bridge leaves some settings of HookedTransformer out in silence: they are refused.
    """
    import warnings

    import transformer_lens

    from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
    from tests.versions import is_native

    settings = {
        "n_layers": 2,
        "d_model": 12,
        "n_ctx": 9,
        "d_head": 5,
        "n_heads": 4,
        "d_vocab": 17,
        "act_fn": "gelu",
        "device": "cpu",
    }
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.manual_seed(2)
        if HAS_HOOKED_TRANSFORMER:
            config = transformer_lens.HookedTransformerConfig(**(settings | changes))
            model = transformer_lens.HookedTransformer(config)
            if tokenizer is not None:
                model.set_tokenizer(tokenizer)
            return model
        assert is_native(changes), "mark the test with needs_hooked_transformer"
        config = transformer_lens.TransformerBridgeConfig(**(settings | changes))
        return transformer_lens.TransformerBridge.boot_native(config, tokenizer=tokenizer)


def make_model_without_masks():
    """A causal model over token ids that takes an attention mask, and leaves it out."""
    model = make_token_model()
    forward = model.forward
    model.forward = lambda ids, attention_mask=None, **settings: forward(ids, **settings)
    return model


@pytest.fixture
def token_inputs() -> torch.Tensor:
    return torch.randint(17, (19, 9), generator=torch.Generator().manual_seed(4))


def some_of(cases, *always):
    """The cases of a grid, of which some run always, by value; the others are slow."""
    assert all(case in cases for case in always)
    several = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [
        pytest.param(*values, marks=() if case in always else pytest.mark.slow)
        for case, values in zip(cases, several, strict=True)
    ]


def spread(*axes):
    """Cells of a grid in which every value of every axis stands, as few as that takes."""
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]


@cache
def _third():
    """Which third of tests this commit runs; None for all: SLOW=all, or without a commit."""
    if os.environ.get("SLOW") == "all":
        return None
    command = ["git", "-C", os.path.dirname(__file__), "rev-parse", "--short=7", "HEAD"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True).stdout, 16) % 3
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def find_chromium():
    """The browser's path; None lets playwright take its own."""
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def pytest_collection():
    """Collecting imports all packages, and looking for garbage meanwhile finds none."""
    gc.disable()


def pytest_collection_finish():
    """The garbage collector of the tests leaves out what was imported, which is never freed.

    And it looks seldom: sources that are parsed, and models, are many objects and little garbage.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


STARTERS = {"started", "printed_by", "server"}  # of tests/processes.py


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the tests of a file that open a browser the first is run always, the others are slow.

    Files that open it or start programs come first, so that one of several workers runs them all:
    each that does starts a browser and a server of its own.

    Of slow tests a third runs with SLOW=1, another one after most commits; with THIRD=1 so of all.
    """
    opened = set()
    for item in items:
        if "browser" in item.fixturenames:
            if item.path in opened:
                item.add_marker("slow")
            opened.add(item.path)
        own = crc32(item.nodeid.encode()) % 3
        of_thirds = item.get_closest_marker("slow") or os.environ.get("THIRD")
        if of_thirds and _third() not in (None, own):
            item.add_marker("of_another_commit")
    starts = opened | {item.path for item in items if STARTERS & vars(item.module).keys()}
    items.sort(key=lambda item: item.path not in starts)


@pytest.fixture
def forked_workers():
    """Workers of this process are forked from a server that has the libraries loaded."""
    from joblib.externals.loky.backend.context import set_start_method

    set_start_method(server().get_start_method(), force=True)
    yield
    set_start_method(None, force=True)


@pytest.fixture(scope="session")
def browser():
    """One headless browser for the session."""
    sync = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with sync.sync_playwright() as playwright:
        path = find_chromium() or playwright.chromium.executable_path
        if not os.path.exists(path):
            pytest.skip("there is no chromium: apt-get install chromium, or set CHROMIUM")
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


def resident():
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def least_memory():
    """What the process held when memory went back to the system."""
    return [resident()] if sys.platform == "linux" else []


@pytest.fixture(scope="module", autouse=True)
def memory_returned(least_memory):
    """What the tests of a file took goes back to the system where it is much; glibc would keep it.

    What is left then, imported modules above all, is not looked through again.
    """
    yield
    if least_memory and resident() > least_memory[0] + (200 << 20):
        gc.collect()
        gc.freeze()
        ctypes.CDLL(None).malloc_trim(0)
        least_memory[0] = resident()
