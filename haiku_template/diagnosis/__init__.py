"""Why the GPU is not used: the causes, how to see them, and what to do.

Standard library only; JAX and the driver are asked in child processes with a limit.
"""

from haiku_template.diagnosis.causes import STEPS, TABLE, check_environment, diagnose
from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.rows import Cause, Facts, Finding

__all__ = [
    "STEPS",
    "TABLE",
    "Cause",
    "Facts",
    "Finding",
    "Machine",
    "check_environment",
    "diagnose",
]
