"""Continues a text with the language model of a run.

    python -m haiku_template.generate --workdir=runs/gpt_bytes --prompt="def main("

Prints the text as it comes; with --prompt_file, which holds a prompt a line, all texts
at the end, with a line of dashes between them. Exit codes: 0 done, 64 bad configuration
or prompt, 69 device not available, 74 checkpoint storage, 130 interrupted.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

from absl import flags

from haiku_template import cli
from haiku_text import generate

flags.adopt_module_key_flags(generate)

if __name__ == "__main__":
    cli.run(generate.guarded)
