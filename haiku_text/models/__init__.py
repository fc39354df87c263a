"""Language models in Hugging Face's layout: GPT-2 and BERT."""

from haiku_text.models.bert import bert as bert
from haiku_text.models.gpt import Cache as Cache
from haiku_text.models.gpt import gpt as gpt
from haiku_text.models.gpt import gpt_flops_per_token as gpt_flops_per_token
from haiku_text.models.logits import LazyLogits as LazyLogits
from haiku_text.models.logits import multiply_out as multiply_out
from haiku_text.models.logits import token_losses as token_losses
