"""Results on the Hugging Face hub: folders that are uploaded as a dataset, and read from one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infoflow_lens.foundation.errors import InfoFlowError, first_line
from infoflow_lens.foundation.files import temporary_folder


def push(
    repo_id: str,
    write: Callable[[Path], None],
    card: str,
    *,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Upload what `write` writes, in one commit, as a dataset of the hub, which is made if needed.

    Args:
        repo_id: "owner/name".
        write: writes all files to the folder that it is given.
        card: the README.md of the dataset, where it has none yet.
        private: whether a new dataset can be seen by its owners alone; default, as the hub has it.
        token: default, that of ``hf auth login`` or HF_TOKEN.

    Returns:
        The address of the dataset.

    Raises:
        InfoFlowError: for a name that the hub refuses, a missing or wrong token, or no network.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with temporary_folder() as folder:
        write(folder)
        with _name_dataset_in_errors(repo_id):
            address = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
            # a card that the user has edited stays
            if not api.file_exists(repo_id, "README.md", repo_type="dataset"):
                (folder / "README.md").write_text(card, encoding="utf-8")
            api.upload_folder(
                repo_id=repo_id,
                repo_type="dataset",
                folder_path=folder,
                commit_message="Upload with infoflow-lens",
            )
    return str(address)


def pull(
    repo_id: str, patterns: Sequence[str], *, revision: str | None = None, token: str | None = None
) -> Path:
    """A folder with files of a dataset of the hub, from the local cache where they are in it.

    Args:
        repo_id: "owner/name".
        patterns: of their paths, with "*" for anything.
        revision: branch, tag or commit; default, the newest.
        token: as for :func:`push`.

    Raises:
        InfoFlowError: if there is no such dataset or revision, or no network.
    """
    from huggingface_hub import snapshot_download

    with _name_dataset_in_errors(repo_id):
        found = snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns),
            token=token,
        )
    return Path(found)


@contextmanager
def _name_dataset_in_errors(repo_id: str) -> Iterator[None]:
    """Turn errors of the hub into an InfoFlowError that names the dataset and says what to do."""
    try:
        yield
    except Exception as error:  # versions of the hub raise different errors
        raise InfoFlowError(f"{repo_id!r}: {_explain_failure(error)}") from error


def _explain_failure(error: Exception) -> str:
    from huggingface_hub import errors

    said = first_line(error)
    if isinstance(error, errors.HFValidationError):
        return f"the name is not allowed ({said}): expected owner/name"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no such revision ({said}): expected a branch, a tag or a commit"
    if isinstance(error, (errors.HfHubHTTPError, errors.LocalTokenNotFoundError)):
        return (
            f"the hub refuses it ({said}): expected a dataset that your token may use; log in (hf "
            "auth login, or HF_TOKEN), and look at the name"
        )
    return (
        f"the hub cannot be reached ({type(error).__name__}: {said}): try again where there is a "
        "network, with HF_HUB_OFFLINE unset"
    )
