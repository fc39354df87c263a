"""Text: token files, documents and JSON-lines, as functions of the step."""

from haiku_text.data.documents import byte_text as byte_text
from haiku_text.data.files import TokenWriter as TokenWriter
from haiku_text.data.files import open_tokens as open_tokens
from haiku_text.data.jsonl import jsonl as jsonl
from haiku_text.data.texts import text_lengths as text_lengths
from haiku_text.data.tokenizer import Tokenizer as Tokenizer
from haiku_text.data.windows import TokenDataset as TokenDataset
from haiku_text.data.windows import TokenEvaluationSet as TokenEvaluationSet
from haiku_text.data.windows import tokens as tokens
