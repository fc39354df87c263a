"""Text: token files, documents and JSON-lines, as functions of the step."""

from haiku_template.data.text.documents import byte_text
from haiku_template.data.text.files import TokenWriter, open_tokens
from haiku_template.data.text.jsonl import jsonl
from haiku_template.data.text.tokenizer import Tokenizer
from haiku_template.data.text.windows import TokenDataset, TokenEvaluationSet, tokens

__all__ = [
    "TokenDataset",
    "TokenEvaluationSet",
    "TokenWriter",
    "Tokenizer",
    "byte_text",
    "jsonl",
    "open_tokens",
    "tokens",
]
