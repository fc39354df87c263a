"""Doctor: the cause for which the GPU is not used, and its fix.

Stands alone: standard library only. Child processes with a time limit ask JAX and the
driver.
"""

from haiku_template.doctor import card, libraries, packages, start, variables
from haiku_template.doctor.children import end_children
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
__all__ += ["check_environment", "diagnose", "end_children"]
