"""BERT encoders (Devlin et al. 2018, arXiv:1810.04805), in Hugging Face's arithmetic.

Post-normalization, exact GELU, learned positions. MiniLM and the sentence encoders made
of it are BERT encoders of other sizes.

Shapes: B texts, T tokens, D width, K outputs.
"""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.errors import ConfigError
from haiku_template.models.attention import IMPLEMENTATIONS, attend
from haiku_text.models import layers
from haiku_text.models.family import Family, Keyword, layer_rules

POOLINGS = ("cls", "mean")
HEAD = "bert/head"  # Of a classifier; sentence encoders have none.


class Sizes(NamedTuple):
    """Sizes of the encoder, as `bert` takes them."""

    vocab_size: int
    context: int
    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    token_types: int


def bert(
    num_outputs: int | None,
    axis_name: str | None = None,
    *,
    pooling: str = "cls",
    vocab_size: int = 30522,
    context: int = 512,
    width: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    mlp_width: int = 3072,
    token_types: int = 2,
    dropout: float = 0.1,
    norm_eps: float = 1e-12,
    attention: str = "auto",
    remat: bool = False,
) -> hk.Transformed:
    """A text classifier, or a sentence encoder: texts to [B, K] or to [B, D].

    Inputs are a dictionary of `tokens` (int [B, T]), `mask` (int or bool [B, T], 0 for
    padding) and, optionally, `token_types` (int [B, T]; 0 without) and `lengths` (int
    [B], as `haiku_text.data.text_lengths` counts them), which cuDNN's attention needs.
    The model keeps no statistics of the batch, so `axis_name` is not used.

    Args:
      num_outputs: K; None gives the pooled texts themselves, each of length 1.
      pooling: `cls` for the first token, through the pooler; `mean` over the tokens.
      context: longest text, in tokens.
      width: D, a multiple of `num_heads`.
      mlp_width: units of the hidden layer of each MLP.
      token_types: number of token types (segments).
      dropout: share of units dropped in training, in [0, 1); none of the attention's.
      norm_eps: added to variances.
      attention: `auto` (cuDNN's flash attention where it exists), `xla` or `cudnn`.
      remat: recompute each block in the backward pass: more work, much less memory.

    Raises:
      ValueError: an unknown pooling or attention, or a value out of its range.
      ConfigError: when traced: a text of more tokens than `context`, or no such
        attention here.
    """
    del axis_name
    sizes = Sizes(
        vocab_size, context, width, num_layers, num_heads, mlp_width, token_types
    )
    if pooling not in POOLINGS:
        raise ValueError(
            f"pooling={pooling!r} is not known; possible are {', '.join(POOLINGS)}"
        )
    if attention not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention={attention!r}; possible are {', '.join(IMPLEMENTATIONS)}"
        )
    if min(sizes) < 1 or width % num_heads or not 0 <= dropout < 1:
        raise ValueError(
            f"{sizes} and dropout={dropout} are not all possible: sizes are 1 or more, "
            "num_heads divides width, and dropout is in [0, 1)"
        )

    def forward(inputs: dict[str, jax.Array], is_training: bool) -> jax.Array:
        with hk.name_scope("bert"):
            rate = dropout if is_training else 0.0
            hidden = encode(inputs, sizes, norm_eps, rate, attention, remat)
            pooled = pool(hidden, inputs["mask"], pooling)
            if num_outputs is None:
                return _normalized(pooled)
            return layers.linear(num_outputs, "head")(layers.drop(rate, pooled))

    return hk.transform(forward)


def encode(
    inputs: dict[str, jax.Array],
    sizes: Sizes,
    norm_eps: float,
    rate: float = 0.0,
    attention: str = "auto",
    remat: bool = False,
) -> jax.Array:
    """Encodes `bert`'s inputs: last hidden states [B, T, D], arbitrary at padding."""
    tokens = inputs["tokens"]
    length = tokens.shape[1]
    if length > sizes.context:
        raise ConfigError(
            f"a text of {length} tokens is longer than the {sizes.context} that the "
            "model has positions for (context): cut texts to that length, in a config "
            f"with data.context={sizes.context} and data.truncate=True"
        )
    lengths = inputs.get("lengths")
    if attention == "cudnn" and lengths is None:
        raise ConfigError(
            "attention=cudnn was asked for, and the inputs have a mask and no lengths; "
            "haiku_text.data.text_lengths counts them if padding is on the right, and "
            "attention=auto does without"
        )
    attention = "xla" if hk.running_init() else attention  # Traced in float32.
    x = layers.look_up(layers.table(sizes.vocab_size, sizes.width, "embed"), tokens)
    segments = layers.table(sizes.token_types, sizes.width, "token_types")
    x += layers.look_up(segments, inputs.get("token_types", jnp.zeros_like(tokens)))
    positions = layers.table(sizes.context, sizes.width, "positions")
    x += layers.repeat(positions[:length], tokens.shape[0])
    x = layers.drop(rate, layers.norm("norm", norm_eps)(x))
    mask = inputs["mask"][:, None, None, :].astype(bool)  # Of the tokens that are seen.
    heads = (*tokens.shape, sizes.num_heads, sizes.width // sizes.num_heads)

    def block(x: jax.Array, mask: jax.Array, lengths: jax.Array | None) -> jax.Array:
        with hk.name_scope("attention"):
            query, key, value = (
                layers.linear(sizes.width, name)(x).reshape(heads)
                for name in ("query", "key", "value")
            )
            y = attend(attention, query, key, value, mask, lengths=lengths)
            y = layers.linear(sizes.width, "projection")(y.reshape(x.shape))
        x = layers.norm("norm_1", norm_eps)(x + layers.drop(rate, y))
        y = layers.feed_forward(x, sizes.mlp_width, approximate=False)
        return layers.norm("norm_2", norm_eps)(x + layers.drop(rate, y))

    block = hk.remat(block) if remat else block
    for i in range(sizes.num_layers):
        with hk.name_scope(f"block_{i}"):
            x = block(x, mask, lengths)
    return x


def pool(hidden: jax.Array, mask: jax.Array, pooling: str) -> jax.Array:
    """Pools as `bert` is asked to: [B, T, D] to [B, D]."""
    if pooling == "cls":
        return jnp.tanh(layers.linear(hidden.shape[-1], "pooler")(hidden[:, 0]))
    weights = mask[:, :, None].astype(jnp.float32)  # bfloat16 counts to 256.
    count = jnp.maximum(jnp.sum(weights, axis=1), 1)  # A row may be all padding.
    return (jnp.sum(hidden * weights, axis=1) / count).astype(hidden.dtype)


def _normalized(x: jax.Array) -> jax.Array:
    """Scales each row to length 1, in float32; a row of zeros stays."""
    x = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def describe_classes(
    params: hk.Params, keys: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """Makes the keys of a classifier in Hugging Face's config.json; {} without a head.

    Raises `ConfigError` for a pooling that Hugging Face's classifiers do not compute.
    """
    if HEAD not in params:
        return {}
    if (pooling := keys.get("pooling", "cls")) != "cls":
        raise ConfigError(
            f"config.model.pooling={pooling}, and Hugging Face's classifiers know cls "
            "alone: transformers would load the folder and compute something else; "
            "train with --config.model.pooling=cls, or export this run with "
            "--format=stablehlo"
        )
    return {
        "architectures": ["BertForSequenceClassification"],
        "problem_type": "single_label_classification",
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


_TASKS = ("SequenceClassification", "MaskedLM", "PreTraining", "NextSentencePrediction")
_LAYER, _BLOCK = "[bert.]encoder.layer.{}.", "bert/block_{}/"
bert.family = Family(
    model_type="bert",
    architectures=("BertModel", *(f"BertFor{task}" for task in _TASKS)),
    keywords=(
        Keyword("vocab_size", "vocab_size", 30522),
        Keyword("context", "max_position_embeddings", 512),
        Keyword("width", "hidden_size", 768),
        Keyword("num_layers", "num_hidden_layers", 12),
        Keyword("num_heads", "num_attention_heads", 12),
        Keyword("mlp_width", "intermediate_size", 3072),
        Keyword("token_types", "type_vocab_size", 2),
        Keyword("dropout", "hidden_dropout_prob", 0.1),
        Keyword("norm_eps", "layer_norm_eps", 1e-12),
    ),
    fixed=lambda config: {
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    # Skipped are positions that count from 0, and the heads of pretraining.
    rules=layer_rules(f"""
        embedding  [bert.]embeddings.word_embeddings        bert/embed
        embedding  [bert.]embeddings.position_embeddings    bert/positions
        embedding  [bert.]embeddings.token_type_embeddings  bert/token_types
        norm       [bert.]embeddings.LayerNorm              bert/norm
        linear     {_LAYER}attention.self.query             {_BLOCK}attention/query
        linear     {_LAYER}attention.self.key               {_BLOCK}attention/key
        linear     {_LAYER}attention.self.value             {_BLOCK}attention/value
        linear     {_LAYER}attention.output.dense           {_BLOCK}attention/projection
        norm       {_LAYER}attention.output.LayerNorm       {_BLOCK}norm_1
        linear     {_LAYER}intermediate.dense               {_BLOCK}mlp/up
        linear     {_LAYER}output.dense                     {_BLOCK}mlp/down
        norm       {_LAYER}output.LayerNorm                 {_BLOCK}norm_2
        linear?    [bert.]pooler.dense                      bert/pooler
        linear?    classifier                               bert/head
        skip       [bert.]embeddings.position_ids
        skip       cls.*
    """),
    describe_classes=describe_classes,
)
