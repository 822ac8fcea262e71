"""Models that come with the package; each is a folder beside this file, as Hugging Face has it."""

from pathlib import Path

SHIPPED = {
    "stdlib-2l": "two attention-only layers of 8 heads, trained on Python's standard library, with "
    "previous-token and induction heads",
}


def find_package_folder(name: str) -> Path | None:
    """Find the folder of a model that comes with the package; None for another name."""
    return Path(__file__).parent / name.lower() if name.lower() in SHIPPED else None
