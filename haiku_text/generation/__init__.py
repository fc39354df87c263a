"""Generation of text with a trained language model."""

from haiku_text.generation.generator import LanguageModel as LanguageModel
from haiku_text.generation.generator import load as load
from haiku_text.generation.generator import make_generate as make_generate
from haiku_text.generation.generator import pieces as pieces
from haiku_text.generation.sampling import Sampling as Sampling
from haiku_text.generation.sampling import sample as sample
