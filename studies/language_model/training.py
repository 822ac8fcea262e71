"""Training of a language model, interruptible at any moment and resumed to the same bytes."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, writable_folder, write_json, write_text
from infoflow_lens.foundation.memory import check_device
from infoflow_lens.foundation.packages import versions_identity
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord, fingerprint
from infoflow_lens.foundation.saving import read_state, write_state
from infoflow_lens.runs.folder import RunFolder
from infoflow_lens.studies.language_model.batches import (
    repeat_random,
    text_windows,
    training_batch,
)
from infoflow_lens.studies.language_model.card import model_card
from infoflow_lens.studies.language_model.config import LanguageModelConfig
from infoflow_lens.studies.language_model.corpus import SPLITS, Corpus, Split, read_corpus
from infoflow_lens.studies.language_model.measures import (
    loss_on_repeats,
    mean_loss,
    patterns,
    prefix_matching,
    previous_token,
)
from infoflow_lens.studies.language_model.model import build_language_model
from infoflow_lens.studies.language_model.ngram import NGram
from infoflow_lens.studies.language_model.tokens import (
    save_tokenizer,
    token_stream,
    train_tokenizer,
)

_STATE = "training.safetensors"
_WRITES = ("config.json", "model.safetensors", "measured.json", "README.md", "history.json", _STATE)
# A checkpoint is also written where the best prefix matching has moved by this much.
_MOVED = 0.05
HELD_OUT: tuple[Split, ...] = ("validation", "test")
_N_REPEATED, _N_WATCHED = 32, 64  # sequences for the history


@dataclass(frozen=True)
class TrainedLanguageModel:
    """The files and numbers of a finished training run.

    Attributes:
        folder: of the model in the format of Hugging Face, in half precision.
        history: a row every ``evaluate_every`` steps.
        measured: what was measured at the end, as in measured.json.
    """

    folder: Path
    history: tuple[Mapping[str, Any], ...]
    measured: Mapping[str, Any]


def train_language_model(
    out: str | os.PathLike[str],
    config: LanguageModelConfig,
    *,
    name: str = "language model",
    corpus: Corpus | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> TrainedLanguageModel:
    """Train a model on the standard library and save it with its tokenizer, history and record.

    The folder gets the model in the format of Hugging Face and half precision, its card and
    ``measured.json``, of which the card is made; ``checkpoints/step-XXXXXX`` in the same format and
    float32 (after 0, 1, 2, 4, ... steps, and wherever the best prefix matching has moved by .05);
    ``history.json``; and ``test.jsonl``, the held-out texts in chunks. A run that was stopped goes
    on from its last saved state, to the same bytes.

    Args:
        out: the folder.
        config: the settings.
        name: what the bar shows.
        corpus: texts; default, those of the running Python.
        device: where it is trained; other devices round otherwise.
        progress: whether to show a bar.

    Raises:
        InfoFlowError: if the folder cannot be written or holds another run, the corpus is too
            small, the device does not answer, or the loss is no longer finite.
        KeyboardInterrupt: when stopped by Ctrl-C, saying from where the same call goes on.
    """
    device, corpus = check_device(device), corpus or read_corpus()
    with (
        RunFolder.open(out, "training of a language model", _WRITES) as folder,
        _threads(config.threads),
    ):
        run = _Run(folder, config, corpus, name, device)
        run.resume()
        with progress_bar(name, config.n_steps, progress, done=run.step) as advance:
            try:
                while run.step < config.n_steps:
                    run.take_step()
                    advance(1, run.status())
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"training stopped in step {run.step + 1}; the same call goes on behind step "
                    f"{run.saved}"
                ) from None
        return run.finish()


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """Let PyTorch use `n` threads in a block, and restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """The state of a training run between two steps."""

    def __init__(
        self,
        out: RunFolder,
        config: LanguageModelConfig,
        corpus: Corpus,
        name: str,
        device: str,
    ) -> None:
        self.out, self.folder = out, out.path
        self.config, self.corpus, self.name = config, corpus, name
        self.tokenizer = train_tokenizer(corpus.texts("train"), config.vocabulary)
        entries = self.tokenizer.get_vocab_size()
        if entries < config.vocabulary:
            raise InfoFlowError(
                f"the training text gives {entries} entries for the tokenizer: expected "
                f"vocabulary, {config.vocabulary}, of them; lower it, or give more text"
            )
        self.streams = {
            split: token_stream(self.tokenizer, corpus.texts(split)) for split in SPLITS
        }
        for split, stream in self.streams.items():
            if len(stream) < config.n_context:
                raise InfoFlowError(
                    f"the {split} part has {len(stream)} tokens: expected at least n_context, "
                    f"{config.n_context}; give more text"
                )
        self.model = build_language_model(config)
        self.identity = {
            "config": config.to_dict(),
            "corpus": corpus.fingerprint,
            "tokens": fingerprint({str(split): stream for split, stream in self.streams.items()}),
        }
        self.record = RunRecord.from_model(self.model, self.identity, config.seed)
        self.model.to(device)  # type: ignore[arg-type, unused-ignore]
        # what is fixed gets no weight decay either
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay)
        half = min(config.longest_repeat, (config.n_context - 1) // 2)
        self.repeated = repeat_random(config.vocabulary, _N_REPEATED, half)
        self.watched = text_windows(self.streams["validation"], config.n_context, _N_WATCHED)
        self.step = self.saved = 0
        self.history: list[dict[str, Any]] = []
        self.losses: list[float] = []  # since the last row of the history
        self.prefix_matching_saved = 0.0  # the best of the last checkpoint

    def take_step(self) -> None:
        # the row and the checkpoint of the untrained model
        if self.step == 0:
            self._evaluate()
        config = self.config
        # which texts a step sees depends on its number alone, so that a run goes on with the same
        ids = training_batch(self.streams["train"], config, self.step).to(self.model.device)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate(self.step)
        self.model.train()
        logits = self.model(ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        value = loss.item()
        if not math.isfinite(value):
            raise InfoFlowError(
                f"the loss is no longer finite in step {self.step + 1} (learning rate "
                f"{config.learning_rate(self.step):.2e}): expected a finite loss; lower lr or "
                "grad_clip, and use another folder"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        self.optimizer.step()
        self.losses.append(value)
        self.step += 1
        self._evaluate()
        if self.step % config.save_every == 0 or self.step == config.n_steps:
            self.save()

    def _evaluate(self) -> None:
        """Keep a row of the history and a checkpoint, where this step has them."""
        config, step = self.config, self.step
        # 0 and the powers of two, which are dense where training begins
        due = step & (step - 1) == 0 or step == config.n_steps
        if step % config.evaluate_every and not due:
            return
        row = self._row()
        best = max(max(layer) for layer in row["prefix_matching"])
        due |= abs(best - self.prefix_matching_saved) >= _MOVED
        self.history.append(row)
        self.losses = []
        if due:
            self.prefix_matching_saved = best
            self._save_model(self.folder / "checkpoints" / f"step-{step:06d}")

    def _row(self) -> dict[str, Any]:
        pattern = patterns(self.model, self.repeated)
        return {
            "step": self.step,
            "lr": self.config.learning_rate(self.step),
            "train_loss": sum(self.losses) / len(self.losses) if self.losses else math.nan,
            "validation_loss": mean_loss(self.model, self.watched),
            "repeated_loss": loss_on_repeats(self.model, self.repeated),
            "prefix_matching": prefix_matching(pattern).tolist(),
            "previous_token": previous_token(pattern).tolist(),
        }

    def status(self) -> str:
        row = self.history[-1]
        best = max(max(layer) for layer in row["prefix_matching"])
        return f"validation {row['validation_loss']:.3f} nats, prefix matching {best:.2f}"

    def save(self) -> None:
        write_json(self.folder / "history.json", self.history)
        state = {
            "step": self.step,
            "model": self._weights(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
            "losses": self.losses,
            "prefix_matching_saved": self.prefix_matching_saved,
        }
        write_state(self.folder / _STATE, state)
        self.saved = self.step

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.cpu() for name, weight in self.model.state_dict().items()}

    def resume(self) -> None:
        self.out.claim(
            {
                "settings": self.identity["config"],
                "the texts": self.identity["corpus"],
                "the texts' tokens": self.identity["tokens"],
                **versions_identity(),
            }
        )
        writable_folder(self.folder / "checkpoints")
        if not self.out.holds(_STATE):
            return
        hint = "expected the state of a training run; delete it, or use another folder"
        state = read_state(self.folder / _STATE, "the unfinished training", hint)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.history, self.losses = state["step"], state["history"], state["losses"]
        self.prefix_matching_saved = state["prefix_matching_saved"]
        self.saved = self.step

    def _save_model(self, target: Path) -> None:
        """Save the model with its tokenizer, whole or not at all."""
        temporary = self.out.scratch / target.name
        temporary.mkdir()
        self._write_model(temporary, self._weights(), "float32")
        self.out.replace_folder(temporary, target)

    def finish(self) -> TrainedLanguageModel:
        """Return the model in half precision, and what is measured of it as it was saved."""
        write_json(self.folder / "history.json", self.history)
        write_text(self.folder / "test.jsonl", self._test_text())
        windows = {
            split: text_windows(self.streams[split], self.config.n_context) for split in HELD_OUT
        }
        # before the weights are rounded, to tell what that costs
        loss_float32 = mean_loss(self.model, windows["validation"])
        half = {name: weight.half() for name, weight in self._weights().items()}
        # what is measured is the model as it is saved, with rounded weights
        self.model.load_state_dict(half)
        pattern = patterns(self.model, self.repeated)
        ngram = NGram(self.streams["train"], self.config.vocabulary)
        # the last tokens, which fill no window, are predicted by neither
        predicted = {split: windows[split][:, 1:].flatten() for split in HELD_OUT}
        measured = {
            "loss": {split: mean_loss(self.model, windows[split]) for split in HELD_OUT},
            "loss_float32": loss_float32,
            "ngram": {
                split: {str(order): loss for order, loss in ngram.losses(stream).items()}
                for split, stream in predicted.items()
            },
            "repeated_loss": loss_on_repeats(self.model, self.repeated),
            "chance": math.log(self.config.vocabulary - 1),
            "half": (self.repeated.shape[1] - 1) // 2,
            "prefix_matching": prefix_matching(pattern).tolist(),
            "previous_token": previous_token(pattern).tolist(),
            "parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "corpus": {
                split: {**size, "tokens": len(self.streams[split])}
                for split, size in self.corpus.sizes().items()
            },
            "fingerprint": fingerprint(half),
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
            "record": self.record.to_dict(),
        }
        self._write_model(self.folder, half, "float16")
        write_json(self.folder / "measured.json", measured)
        write_text(self.folder / "README.md", model_card(self.name, measured))
        return TrainedLanguageModel(self.folder, tuple(self.history), measured)

    def _write_model(self, folder: Path, weights: Mapping[str, Tensor], dtype: str) -> None:
        settings = {**self.model.config.to_diff_dict(), "dtype": dtype}
        write_json(folder / "config.json", settings)
        with atomic_path(folder / "model.safetensors") as temporary:
            save_file(dict(weights), temporary, metadata={"format": "pt"})
        save_tokenizer(self.tokenizer, folder, self.config.n_context)

    def _test_text(self) -> str:
        """Return the test part in chunks that fill the context, a line of JSON each."""
        # without <|endoftext|>, which the saved tokenizer puts before each text
        rows = text_windows(self.streams["test"], self.config.n_context)[:, 1:]
        chunks = self.tokenizer.decode_batch(rows.tolist())
        return "".join(json.dumps({"text": chunk}) + "\n" for chunk in chunks)
