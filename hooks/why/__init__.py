"""Why a head prefers one key to another: the difference of two scores, by what wrote them."""

from infoflow_lens.hooks.why.measure import measure_why, measure_why_all
from infoflow_lens.hooks.why.result import Why, WhyAll

__all__ = ["Why", "WhyAll", "measure_why", "measure_why_all"]
