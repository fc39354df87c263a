"""Before step 0: what is known of a run by tracing alone."""

from haiku_template.config import check_some as check_some
from haiku_template.preflight.budget import check_budget as check_budget
from haiku_template.preflight.budget import memory_budget as memory_budget
from haiku_template.preflight.budget import print_budget as print_budget
from haiku_template.preflight.budget import print_targets as print_targets
from haiku_template.preflight.budget import settle as settle
from haiku_template.preflight.checks import check_functions as check_functions
from haiku_template.preflight.checks import check_parts as check_parts
from haiku_template.preflight.fit import FIT_KEYS as FIT_KEYS
from haiku_template.preflight.fit import NothingFits as NothingFits
from haiku_template.preflight.fit import fit as fit
