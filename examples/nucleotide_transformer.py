"""Nucleotide Transformer's way from joblib to a head: config, model and data.

    python -m haiku_template.convert --input=pytree_ckpt.joblib --output=nt.safetensors
    python -m haiku_template.train --config=examples/nucleotide_transformer.py \
        --workdir=runs/dna --config.init_from=nt.safetensors

Its code (instadeepai/nucleotide-transformer) is in no package, so that `Encoder` is
none of it: one block of attention whose parameters have the names of its modules. With
theirs, `model` calls `NucleotideTransformer(config=CONFIG, name="esm_transformer")`.

Shapes: B examples, T tokens of six bases, D width.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import config_dict

from haiku_template.config import default_config
from haiku_template.data import BatchSpec, Data, Split, from_split

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 12, 32, 4
# As its rename_modules_dcnuc: the file's names, and those of its modules.
RENAME = (
    ("*/mha/*", "*/self_attention/*"),
    ("*/mha_layer_norm/*", "*/self_attention_layer_norm/*"),
)


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment."""
    config = default_config()
    config.num_steps, config.batch_size, config.log_every = 60, 16, 20
    config.model = {"name": "examples.nucleotide_transformer:model"}
    config.data = {"name": "examples.nucleotide_transformer:data"}
    config.finetuning.rename = RENAME
    config.finetuning.train = config.finetuning.fresh = ("head/*",)
    config.finetuning.ignore = ("*/esm_roberta_lm_head/*",)
    config.optimizer.learning_rate = 1e-2
    return config


class Block(hk.Module):
    """A layer of attention before one of two dense ones: [B, T, D]."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds both to `x`."""

        def norm(name: str, x: jax.Array) -> jax.Array:
            return hk.LayerNorm(-1, True, True, name=name)(x)

        init = hk.initializers.VarianceScaling(1.0)
        attention = hk.MultiHeadAttention(
            HEADS, WIDTH // HEADS, w_init=init, name="self_attention"
        )
        y = norm("self_attention_layer_norm", x)
        x = x + attention(y, y, y)
        y = hk.Linear(2 * WIDTH, name="fc1")(norm("final_layer_norm", x))
        return x + hk.Linear(WIDTH, name="fc2")(jax.nn.gelu(y))


class Encoder(hk.Module):
    """Stands for NucleotideTransformer: embeddings [B, T, D] of tokens [B, T]."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embeds, and runs its only layer."""
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        places = hk.get_parameter(
            "places", x.shape[1:], init=hk.initializers.RandomNormal()
        )
        return Block(name="attention_layer_0")(x + places)


def model(num_outputs: int, axis_name: str | None) -> hk.Transformed:
    """Logits [B, num_outputs] of a new head over the mean of all embeddings."""
    del axis_name

    def forward(inputs: jax.Array) -> jax.Array:
        words = Encoder(name="esm_transformer")(inputs)
        return hk.Linear(num_outputs, name="head")(jnp.mean(words, axis=1))

    return hk.transform(forward)


def data(spec: BatchSpec) -> Data:
    """Makes sequences of random tokens, with a motif or without."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, VOCABULARY, (320, LENGTH)).astype(np.int32)
    labels = (np.arange(320) % 2).astype(np.int32)
    tokens[labels == 1, 3:6] = (1, 2, 3)
    return from_split(
        Split(tokens[:256], labels[:256], tokens[256:], labels[256:]), spec
    )
