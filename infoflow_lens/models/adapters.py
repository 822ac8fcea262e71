"""Adapters of PEFT in a folder: checked, and put on their base by PEFT."""

import re
import warnings
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import read_json, user_path
from infoflow_lens.foundation.packages import import_optional
from infoflow_lens.models.pretrained import read_shapes

ADAPTER = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What is read of a config. Entries beside these are empty: they would copy layers, import modules
# by name, add matrices that are not among the weights, or draw weights from data.
_READ = (
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout",
    "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "target_modules", "task_type", "trainable_token_indices",
    "use_dora", "use_rslora",
)  # fmt: skip
# an expression that may be searched for without an end: a repeated group, or many repeats
_SLOW = re.compile(r"\)[*+{]|(?:[*+{].*){4}", re.DOTALL)
_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # what draws nothing: weights beside the config take the place of matrices, and OLoRA takes its
    # own off the base, the same in every process
    "init_lora_weights": (True, False, "gaussian", "olora", "orthogonal"),
}


def find_base(folder: Path) -> Path:
    """Find the folder of the model that an adapter is for; nothing is fetched.

    That is the folder which its config names, or what the cache of the hub holds of that name.

    Raises:
        InfoFlowError: for an adapter that is no plain LoRA, for weights that are not there or
            smaller than its config says, and for a base that is not there.
    """
    hint = "expected what save_pretrained of PEFT writes; save or download it again"
    config = read_json(folder / ADAPTER, "config of an adapter", hint)
    other = [name for name, values in _VALUES.items() if config.get(name, values[0]) not in values]
    other += [name for name, value in config.items() if value and name not in _READ]
    searched = [config.get("target_modules"), config.get("exclude_modules")]
    # the keys of these are expressions that PEFT searches for in names of modules
    for name in ("rank_pattern", "alpha_pattern"):
        searched += config[name] if isinstance(config.get(name), dict) else []
    slow = [one for one in searched if isinstance(one, str) and _SLOW.search(one)]
    if slow:
        raise InfoFlowError(
            f"{ADAPTER} in {str(folder)!r} searches modules by {slow[0]!r:.80}, which may take for "
            "ever: expected names, or expressions with at most three repeats and none of a group; "
            "list the modules by name"
        )
    if other:
        said = ", ".join(f"{name} {config[name]!r:.40}" for name in other[:3])
        raise InfoFlowError(
            f"{ADAPTER} in {str(folder)!r} says {said}: expected a LoRA without these settings; "
            "load it yourself, and give PeftModel.from_pretrained(base, "
            f"{str(folder)!r}), or merge the adapter into its base (merge_and_unload) and save that"
        )
    files = [folder / name for name in _WEIGHTS if (folder / name).exists()]
    if not files:
        raise InfoFlowError(
            f"the folder {str(folder)!r} has an {ADAPTER} but no weights ({_WEIGHTS[0]} missing): "
            + hint
        )
    # a rank is a side of a matrix in the file, which may claim sizes that it does not hold
    sides = (max(shape, default=0) for shape in read_shapes(files[:1]).values())
    most = min(max(sides, default=0), files[0].stat().st_size)
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    if not all(isinstance(rank, int) and 0 < rank <= most for rank in ranks):
        raise InfoFlowError(
            f"{ADAPTER} in {str(folder)!r} says rank {max(ranks, key=str)!r}, which the weights "
            f"beside it do not hold: {hint}"
        )
    return _place_of_base(folder, config.get("base_model_name_or_path"), config.get("revision"))


def _place_of_base(folder: Path, name: Any, revision: Any) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name and isinstance(name, str):
        if user_path(name).is_dir():
            return user_path(name)
        try:
            found = try_to_load_from_cache(name, "config.json", revision=revision or None)
        except HFValidationError:  # a path
            found = None
        if isinstance(found, str):
            return Path(found).parent
    raise InfoFlowError(
        f"the base of the adapter in {str(folder)!r} is {name!r}, which is neither a folder here "
        "nor in the cache of the hub, and an adapter may not have it downloaded: expected a base "
        "on this computer; load it once by its name, or merge the adapter into it "
        "(merge_and_unload) and save"
    )


def add_adapter(model: Any, folder: Path, device: str) -> Any:
    """Put the adapter in a folder into the layers of a model of transformers, and return it.

    Raises:
        InfoFlowError: without PEFT, and where weights and model are not made for each other.
    """
    peft = import_optional("peft", "adapters", f"the adapter in {str(folder)!r}")
    with warnings.catch_warnings():
        # PEFT asks transformers by an earlier name
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        config = peft.PeftConfig.from_pretrained(str(folder), trust_remote_code=False)
        wrapped = peft.PeftModel(model, config)
    found = wrapped.load_adapter(str(folder), "default", torch_device=device)
    missing = sorted(found.missing_keys)
    if wrong := missing or sorted(found.unexpected_keys):
        raise InfoFlowError(
            f"the adapter in {str(folder)!r} {'lacks' if missing else 'has'} {wrong[0]}, which its "
            f"base, a {type(model).__name__}, {'has' if missing else 'lacks'} (the first of "
            f"{len(wrong)}): expected an adapter of this model; save or download it again"
        )
    return wrapped.get_base_model()
