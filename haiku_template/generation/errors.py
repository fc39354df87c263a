"""What is said when text cannot be generated as asked."""


class GenerationError(ValueError):
    """A prompt, a tokenizer or a setting that does not fit the model."""

    exit_code = 64
