"""Text: token files, documents and examples in JSON-lines, as functions of the step."""
