"""Reporting: terminal, plots, throughput and profile of a run."""

from haiku_template.reporting.display import first_lines
from haiku_template.reporting.perf import Work, matmul_bytes, matmul_peak
from haiku_template.reporting.report import Report, Writer

__all__ = ["Report", "Work", "Writer", "first_lines"]
__all__ += ["matmul_bytes", "matmul_peak"]
