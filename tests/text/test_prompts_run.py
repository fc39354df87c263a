"""A run on prompts and completions, and what its model writes to such prompts."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from configs import gpt_bytes
from haiku_template.devices import DeviceManager
from haiku_template.runs import start
from tests.runs import run_command

LETTERS = "abcdefgh"
SCRIPT = """
from pathlib import Path
from haiku_template import config
from haiku_template.training import Experiment

def experiment(devices):
    return Experiment.from_config(config.load(Path("config.json")), devices)
"""


def write_tokenizer(path):
    """Characters; a text begins with `<bos>`, as Llama's do."""
    names = ["<bos>", "<eos>", "<unk>", *LETTERS, ">"]
    ids = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(names[:3])
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 0)]
    )
    made.save(str(path))


@pytest.mark.slow
def test_a_prompt_is_continued_as_it_was_trained(tmp_path):
    """Two letters come back in the other order: of `ab>` it is `ba`."""
    write_tokenizer(tmp_path / "tokenizer.json")
    pairs = [(f"{a}{b}>", b + a) for a in LETTERS for b in LETTERS]
    rows = [{"prompt": prompt, "completion": text} for prompt, text in pairs]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    config = gpt_bytes.get_config()
    config.num_steps = config.eval_every = config.log_every = 500
    config.save_every, config.hooks = None, ("samples",)
    config.data = {
        "name": "jsonl",
        "path": str(tmp_path / "a.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "context": 16,
    }
    config.model.update(num_layers=2, width=64, num_heads=2, context=16)
    start.run(config, DeviceManager.create("cpu", num_devices=1), str(tmp_path / "run"))
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    prompts = {json.loads(line)["prompt"].removeprefix("<bos>") for line in lines}
    assert prompts <= {row["prompt"] for row in rows}
    texts = [json.loads(line)["text"] for line in lines]
    assert max(map(len, texts)) < 20  # They end where completions do.
    (tmp_path / "prompts.txt").write_text("ah>\nbg>\ncf>\n")
    # It ends where the completions end.
    flags = [f"--workdir={tmp_path / 'run'}", f"--prompt_file={tmp_path}/prompts.txt"]
    done = run_command("generate", *flags, "--num_tokens=6", "--temperature=0")
    assert done.stdout.split("\n" + "-" * 16 + "\n") == ["ah>ha", "bg>gb", "cf>fc\n"]
    # A script's run has no config.
    (tmp_path / "run" / "config.json").rename(tmp_path / "config.json")
    (tmp_path / "script.py").write_text(SCRIPT)
    flags += ["--experiment=script:experiment", "--num_tokens=6", "--temperature=0"]
    again = run_command("generate", *flags, cwd=tmp_path)
    assert again.stdout == done.stdout, again.stderr
