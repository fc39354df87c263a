"""Text: token files, documents and JSON-lines, as functions of the step."""

from haiku_template.data.text.documents import byte_text as byte_text
from haiku_template.data.text.files import TokenWriter as TokenWriter
from haiku_template.data.text.files import open_tokens as open_tokens
from haiku_template.data.text.jsonl import jsonl as jsonl
from haiku_template.data.text.tokenizer import Tokenizer as Tokenizer
from haiku_template.data.text.windows import TokenDataset as TokenDataset
from haiku_template.data.text.windows import TokenEvaluationSet as TokenEvaluationSet
from haiku_template.data.text.windows import tokens as tokens
