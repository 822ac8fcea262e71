"""A check that reading inputs still calls by hand; settings are declared, see `settings`."""

from typing import Annotated, Any

from annotated_types import Ge

from infoflow_lens.foundation.settings import Remedy, check


def check_integer(value: Any, name: str, least: int = 0, what: str = "") -> int:
    """`value` as an int of at least `least`; the error names its unit.

    Raises:
        InfoFlowError: unless it is one.
    """
    ends = Remedy(f"the unit is a {what.strip()}") if what else None
    found: int = check(value, Annotated[(int, Ge(least), ends)], name)
    return found
