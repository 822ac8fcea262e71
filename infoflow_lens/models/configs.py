"""Configurations of models by name or folder, read without their weights."""

from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError, first_line
from infoflow_lens.foundation.naming import GGUF, find_model, nearest
from infoflow_lens.models.pretrained import config_of_gguf
from infoflow_lens.models.shipped import find_package_folder
from infoflow_lens.theory.shapes import ModelShape, shape_of


def read_shape(name: str) -> ModelShape:
    """Read the shape of a model by name: nothing but its config is read.

    Args:
        name: a folder, a ``config.json``, a GGUF file, a checkpoint of ours, a model that comes
            with the package, a name in the local cache of the Hugging Face hub, ``owner/name`` that
            can be reached there, or a kind of model that transformers knows, such as gpt2, for its
            default configuration.

    Raises:
        InfoFlowError: for what is none of these.
    """
    # in the order in which a name is taken for a model elsewhere: files, what comes with us, names
    named = find_model(name)
    if named.path.suffix == GGUF and named.path.is_file():
        return shape_of(config_of_gguf(named.path))
    if named.kind == "file" and (named.path.exists() or named.is_said):
        return shape_of(named.path)
    name, path = named.name, named.path
    if shipped := find_package_folder(name):
        return shape_of(shipped)
    if path.suffix == ".json":
        raise InfoFlowError(f"there is no file {name!r}: expected a config.json")
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config: Any = None
    reason = ""
    # the local cache first, then the hub, then the defaults of a kind of model
    try:
        if not path.exists():  # else it would be read in the place of the name
            config = AutoConfig.from_pretrained(
                name, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # of the hub, of a file
        reason = first_line(error)
    if config is None and "/" in name:
        from huggingface_hub import hf_hub_download

        try:
            return shape_of(hf_hub_download(name, "config.json"))
        except Exception as error:  # of the hub, of the network
            reason = first_line(error)
    if config is None and name in CONFIG_MAPPING_NAMES:
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[name]()
        config.name_or_path = f"{name} (the default configuration of transformers)"
    if config is None:
        raise InfoFlowError(
            f"{name!r} is no folder and its config cannot be loaded ({reason}): expected a folder "
            f"with a config.json, owner/name of the hub, or a kind of model"
            f"{nearest(name, ['gpt2', 'llama', 'mistral', 'bert', 'gpt_neo', 'gemma2', 'qwen2'])}"
        )
    return shape_of(config)
