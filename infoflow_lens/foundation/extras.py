"""Packages that only some work needs, and that an extra of this package installs."""

from importlib import import_module
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError


def import_optional(module: str, extra: str, purpose: str) -> Any:
    """Import a module of a package that is not in every installation.

    Args:
        module: its import name.
        extra: the extra in ``pyproject.toml`` that installs it.
        purpose: what needs it, as the subject of the message.

    Raises:
        InfoFlowError: if it cannot be imported, with the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise InfoFlowError(
            f"{purpose} needs the package {module!r}, which cannot be imported ({error}): "
            f'install it with: pip install "infoflow-lens[{extra}]"'
        ) from error
