"""Figures and the self-contained HTML report."""

from infoflow_lens.report.page import Report, Stage, render_report

__all__ = ["Report", "Stage", "render_report"]
