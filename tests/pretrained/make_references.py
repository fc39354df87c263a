"""Makes what the tests compare with: models and outputs of Hugging Face's transformers.

Run once, in an environment of its own, and commit what it writes:

    python3.11 -m venv /tmp/references
    /tmp/references/bin/pip install torch==2.15.0 transformers==5.23.0
    /tmp/references/bin/python tests/pretrained/make_references.py

writes `references/bert` and `references/gpt2`: Hugging Face folders of random models
(no two parameters alike, so that none can be taken for another) with their outputs on
the CPU in float32. With a folder that holds all-MiniLM-L6-v2,

    /tmp/references/bin/python tests/pretrained/make_references.py --minilm=FOLDER

writes `references/minilm.safetensors` instead: sentences, their token ids and vectors,
and the hash of the model's file that they belong to.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

REFERENCES = Path(__file__).parent / "references"
# The sizes of both models, in names that all of Hugging Face's configurations know.
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
SENTENCES = (
    "A man is eating food.",
    "Someone has a meal.",
    "The cheetah chases its prey across the field, faster than any other animal!",
    "Überraschung: naïve café, 12.5 % of 東京.",
    "no",
)


def fill(model):
    """Gives each parameter random values: norms around 1, everything else around 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = ("LayerNorm" in name or "ln_" in name) and "weight" in name
            parameter.copy_(0.2 * noise + is_scale)
    return model.eval()


def inputs(generator):
    """Three texts of 9, 4 and 1 tokens: ids, mask and token types, each [3, 9]."""
    tokens = torch.randint(0, 48, (3, 9), generator=generator)
    mask = torch.arange(9)[None] < torch.tensor([9, 4, 1])[:, None]
    types = torch.randint(0, 2, (3, 9), generator=generator)
    return tokens * mask, mask.long(), types * mask


def bert():
    """A classifier of three labels, in one file."""
    config = transformers.BertConfig(**SIZES, intermediate_size=64, num_labels=3)
    model = fill(transformers.BertForSequenceClassification(config))
    model.save_pretrained(REFERENCES / "bert")
    tokens, mask, types = inputs(torch.Generator().manual_seed(1))
    arguments = {"attention_mask": mask, "token_type_ids": types}
    with torch.no_grad():
        encoded = model.bert(tokens, **arguments)
        logits = model(tokens, **arguments).logits
    outputs = {
        "tokens": tokens,
        "mask": mask,
        "token_types": types,
        "hidden": encoded.last_hidden_state,
        "pooled": encoded.pooler_output,
        "logits": logits,
    }
    save_file(outputs, REFERENCES / "bert_outputs.safetensors")


def gpt2():
    """A language model, in shards."""
    config = transformers.GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0)
    model = fill(transformers.GPT2LMHeadModel(config))
    model.save_pretrained(REFERENCES / "gpt2", max_shard_size="50KB")
    tokens = torch.randint(0, 48, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits
    outputs = {"tokens": tokens, "logits": logits}
    save_file(outputs, REFERENCES / "gpt2_outputs.safetensors")


def minilm(folder):
    """Sentence vectors as the model's card computes them: mean, then length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None].float()
    mean = (hidden * mask).sum(1) / mask.sum(1)
    outputs = {
        "tokens": batch["input_ids"],
        "mask": batch["attention_mask"],
        "vectors": torch.nn.functional.normalize(mean, dim=1),
    }
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    words = {"sentences": "\n".join(SENTENCES), "sha256": digest}
    save_file(outputs, REFERENCES / "minilm.safetensors", words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minilm", type=Path, help="a folder with all-MiniLM-L6-v2")
    folder = parser.parse_args().minilm
    REFERENCES.mkdir(exist_ok=True)
    if folder:
        minilm(folder)
    else:
        bert()
        gpt2()
