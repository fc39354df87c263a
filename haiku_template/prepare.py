"""Makes a token file of text with a tokenizer.json, or trains the tokenizer first.

    python -m haiku_template.prepare --input=DIR --tokenizer=tokenizer.json \\
        --output=tokens.safetensors

Needs the extra `text`. Memory stays bounded whatever the size of the text. Exit codes:
0 done, 64 bad flags, text or tokenizer, 74 storage, and nothing was written, 130
interrupted.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

from absl import flags

from haiku_template import cli
from haiku_text import prepare

flags.adopt_module_key_flags(prepare)

if __name__ == "__main__":
    cli.run(prepare.main)
