"""The command `haiku_template.generate`: prompts, and their texts."""

import itertools
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import flags

from haiku_template import cli, signals
from haiku_template.errors import ConfigError

if TYPE_CHECKING:
    from haiku_template.runs import Run

DASHES = "-" * 16
TOKENIZERS = "give --tokenizer=bytes, or --tokenizer=PATH of a tokenizer.json"
FLAGS = cli.FLAGS
flags.DEFINE_string("prompt", "\n", "The text to continue.")
flags.DEFINE_string("prompt_file", None, "A prompt a line, continued side by side.")
flags.DEFINE_integer("num_tokens", 200, "Tokens to write for a prompt.")
flags.DEFINE_float(
    "temperature", 0.8, "Above 1 bolder, below 1 safer; 0 takes the likeliest token."
)
flags.DEFINE_integer("top_k", None, "Choose among so many of the likeliest; or all.")
flags.DEFINE_integer("seed", 0, "Of the choice: the same gives the same text.")
flags.DEFINE_string(
    "tokenizer", None, "bytes, or a tokenizer.json; else what the run's data set says."
)
cli.run_flags()
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Reads prompts, restores the parameters, and prints the text."""
    prompts = read_prompts()
    if FLAGS.num_tokens < 1:
        raise ConfigError(f"--num_tokens={FLAGS.num_tokens}; possible is 1 or more")
    if FLAGS.tokenizer == "":
        raise ConfigError(f"--tokenizer= is empty; {TOKENIZERS}")
    run = cli.open_run(num_devices=1)
    from haiku_text import generation
    from haiku_text.data import Tokenizer

    tokenizer = Tokenizer(FLAGS.tokenizer or tokenizer_of(run))
    # As in training, where the end of a completion was learned, too.
    if run.config:
        special = run.config.data.name == "jsonl"
    else:
        batch = run.trainer.experiment.data.train.batch(0)
        special = isinstance(batch, dict) and "loss_mask" in batch
    tokens = tokenizer.encode(prompts, special=special)
    model = generation.load(run)
    sampling = generation.Sampling(
        FLAGS.temperature, FLAGS.top_k, tokenizer.size, FLAGS.seed
    )
    generate = generation.make_generate(run.devices, model, sampling)
    streams = [tokenizer.stream() for _ in prompts]
    for stream, prompt in zip(streams, tokens, strict=True):
        for token in prompt:
            stream(token)  # The text of later tokens may depend on it.
    with run.devices.explicit_transfers():
        rows = generate(tokens, FLAGS.num_tokens)
        end = tokenizer.end if special else None
        _show(prompts, generation.pieces(rows, streams, end))


def read_prompts() -> list[str]:
    """Reads --prompt or --prompt_file, or raises `ConfigError` if it cannot."""
    path, prompts = FLAGS.prompt_file, [FLAGS.prompt]
    if path is not None and FLAGS["prompt"].present:
        raise ConfigError("--prompt and --prompt_file were given; give one of the two")
    if path is not None:
        from haiku_text.data.documents import prompt_file

        prompts = prompt_file(path)
    for number, prompt in enumerate(prompts, 1):
        where = f"line {number} of {path}" if path else "--prompt"
        if not prompt:
            raise ConfigError(f"{where} is empty; a model continues some text")
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ConfigError(f"{where} is not UTF-8")
    if not prompts:
        raise ConfigError(f"{path} is empty; give a prompt a line")
    return prompts


def tokenizer_of(run: "Run") -> str:
    """Names the tokenizer of a run's data: `bytes`, or a file."""
    from haiku_template.finetuning import trains_a_part
    from haiku_template.training.experiment import make_data

    if run.config and trains_a_part(run.config.finetuning):
        _ = run.trainer  # Raises without the data, which its parameters need.
    try:
        data = make_data(run.config) if run.config else run.trainer.experiment.data
        if data.text is None:
            name = f" {run.config.data.name}" if run.config else ""
            raise ConfigError(
                f"the data set{name} of the run does not say what its tokens stand for"
            )
    except ConfigError as error:  # Also of data that are not there any more.
        raise ConfigError(f"{error}; {TOKENIZERS}") from error
    return data.text


def _show(prompts: list[str], pieces: Iterator[list[str]]) -> None:
    """Prints one text as it comes, or several when they are done."""
    if len(prompts) > 1:
        texts = map("".join, zip(prompts, *pieces, strict=True))
        print(f"\n{DASHES}\n".join(texts), flush=True)
        return
    for (piece,) in itertools.chain([prompts], pieces):
        print(piece, end="", flush=True)
    print(flush=True)


def guarded() -> None:
    """Runs `main`; a closed pipe or Ctrl-C ends it quietly."""
    signals.be_quiet()
    sys.stdout.reconfigure(errors="replace")  # Characters that a terminal lacks.
    try:
        main()
    except BrokenPipeError:
        # Else Python reports it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
