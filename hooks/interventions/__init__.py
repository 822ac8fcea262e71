"""Interventions: named edits of a pass, and what each does to the output."""

from infoflow_lens.hooks.interventions.edits import Edit, edit_head, edit_head_output, heads_of
from infoflow_lens.hooks.interventions.heads import HeadLabels, label_heads
from infoflow_lens.hooks.interventions.ideals import HEAD_IDEALS, AllHeads, HeadIdeals
from infoflow_lens.hooks.interventions.means import MeanPatterns, MeanPatternsProbe
from infoflow_lens.hooks.interventions.next_token import NextTokenLoss
from infoflow_lens.hooks.interventions.probe import EditsOfPass, Intervention, InterventionResult

__all__ = [
    "HEAD_IDEALS",
    "AllHeads",
    "Edit",
    "EditsOfPass",
    "HeadIdeals",
    "HeadLabels",
    "Intervention",
    "InterventionResult",
    "MeanPatterns",
    "MeanPatternsProbe",
    "NextTokenLoss",
    "edit_head",
    "edit_head_output",
    "heads_of",
    "label_heads",
]
