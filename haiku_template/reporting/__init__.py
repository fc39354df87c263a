"""Reporting: terminal, plots, throughput and profile of a run."""

from haiku_template.reporting.display import preamble
from haiku_template.reporting.perf import Work
from haiku_template.reporting.report import Report, Writer

__all__ = ["Report", "Work", "Writer", "preamble"]
