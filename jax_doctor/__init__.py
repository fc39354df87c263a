"""Doctor of JAX: the cause for which the GPU is not used, and its fix.

Stands alone, for every user of JAX: standard library only, and no JAX in this process.
Child processes with a time limit ask JAX and the driver.
"""

from jax_doctor import card, libraries, packages, start, variables
from jax_doctor.children import end_children
from jax_doctor.machine import GPU_NAMES, Machine
from jax_doctor.table import STEPS, Facts, Finding, check_environment, diagnose

# Each of these adds its causes to the table.
CAUSES = (variables, packages, libraries, card, start)
__all__ = ["CAUSES", "GPU_NAMES", "STEPS", "Facts", "Finding", "Machine"]
__all__ += ["check_environment", "diagnose", "end_children"]
