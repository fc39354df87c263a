"""Why the GPU is not used: the causes, how to see them, and what to do.

Stands alone: the standard library, and nothing of the package around it. JAX and the
driver are asked in child processes with a time limit.
"""

from haiku_template.doctor import card, libraries, packages, start, variables
from haiku_template.doctor.machine import GPU_NAMES, Machine
from haiku_template.doctor.table import (
    STEPS,
    Facts,
    Finding,
    check_environment,
    diagnose,
)

# Each of these adds its causes to the table.
CAUSES = (variables, packages, libraries, card, start)
__all__ = ["CAUSES", "GPU_NAMES", "STEPS", "Facts", "Finding", "Machine"]
__all__ += ["check_environment", "diagnose"]
