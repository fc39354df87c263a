"""Text: token files, documents and examples in JSON-lines, as functions of the step."""

from haiku_template.data.text.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
