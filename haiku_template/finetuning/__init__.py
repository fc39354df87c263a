"""Fine-tuning: trainable and frozen parameters, LoRA, pretrained parameters."""

from haiku_template.finetuning.adapters import ADAPTERS as ADAPTERS
from haiku_template.finetuning.adapters import check_same_frozen as check_same_frozen
from haiku_template.finetuning.adapters import load_adapters as load_adapters
from haiku_template.finetuning.adapters import read_facts as read_facts
from haiku_template.finetuning.adapters import save_adapters as save_adapters
from haiku_template.finetuning.lora import Lora as Lora
from haiku_template.finetuning.lora import convolutions as convolutions
from haiku_template.finetuning.plan import Finetuning as Finetuning
from haiku_template.finetuning.plan import Plan as Plan
from haiku_template.finetuning.plan import make_finetuning as make_finetuning
from haiku_template.finetuning.plan import make_plan as make_plan
from haiku_template.finetuning.plan import scale_updates as scale_updates
from haiku_template.finetuning.source import STATE as STATE
from haiku_template.finetuning.source import Source as Source
from haiku_template.finetuning.source import check_classes as check_classes
from haiku_template.finetuning.source import check_readable as check_readable
from haiku_template.finetuning.source import is_folder as is_folder
from haiku_template.finetuning.source import is_lost as is_lost
from haiku_template.finetuning.source import open_source as open_source
from haiku_template.finetuning.source import trains_a_part as trains_a_part
from haiku_template.finetuning.source import vocabulary_of as vocabulary_of
from haiku_template.finetuning.source import with_sizes as with_sizes
from haiku_template.finetuning.source import without_source as without_source
