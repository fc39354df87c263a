"""GPT-2 (Radford et al. 2019), with the names and shapes of its published parameters.

Pre-normalization, learned positions, tied embeddings. Each parameter is one of Hugging
Face's tensors in its shape: `gpt/block_0/attention/qkv` is `h.0.attn.c_attn`.

Shapes: B examples, T tokens, D width, H heads, S tokens of the context, V vocabulary.
"""

import functools
import re
from typing import Any, Literal, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.errors import ConfigError
from haiku_template.models.attention import IMPLEMENTATIONS, attend
from haiku_text.models import layers
from haiku_text.models.family import Family, Keyword, layer_rules
from haiku_text.models.logits import LazyLogits

NAMES = ("tokens", "segments")  # Of packed inputs.
KeysValues = tuple[jax.Array, jax.Array]  # Keys and values: [B, S, H, D / H] each.


class Size(NamedTuple):
    """Sizes that set the shapes of the parameters, besides the vocabulary."""

    num_layers: int
    width: int
    num_heads: int
    context: int


PRESETS = {
    "124M": Size(12, 768, 12, 1024),
    "355M": Size(24, 1024, 16, 1024),
    "774M": Size(36, 1280, 20, 1024),
    "1558M": Size(48, 1600, 25, 1024),
}


class Cache(NamedTuple):
    """KV cache: keys and values of the tokens so far, each computed once."""

    blocks: tuple[KeysValues, ...]  # Entries beyond the lengths are never read.
    lengths: jax.Array  # Tokens held of each example: int32 [B].


def gpt(
    num_outputs: int,
    axis_name: str | None = None,
    *,
    preset: str = "124M",
    num_layers: int | None = None,
    width: int | None = None,
    num_heads: int | None = None,
    context: int | None = None,
    dropout: float = 0.0,
    attention: str = "auto",
    remat: bool = False,
) -> hk.Transformed:
    """A language model: tokens [B, T] to `LazyLogits`, T at most `context`.

    `forward(tokens, is_training, cache=None)`: with `cache="new"`, or the `Cache` of an
    earlier call, it returns (`LazyLogits`, `Cache`). The tokens follow those in the KV
    cache; the caller ensures that they fit. Inputs may also be a dictionary of `tokens`
    and `segments`, int [B, T], without a cache: each run of equal numbers is an example
    of its own, with its own positions, of which no other sees anything. The model keeps
    no statistics of the batch, so `axis_name` is not used.

    Args:
      preset: `124M`, `355M`, `774M` or `1558M`: GPT-2's four sizes, for each of
        `num_layers` (blocks), `width`, `num_heads` and `context` that is None.
      dropout: share dropped in training, in [0, 1): after the embedding, the attention
        and the MLP; never inside attention, as its fused forms cannot.
      attention: `auto` (cuDNN's flash attention where it exists), `xla` or `cudnn`.
      remat: recompute each block in the backward pass: more work, much less memory.

    Raises:
      ValueError: a value out of its range.
      ConfigError: when traced: more tokens than `context`, or no such attention here.
    """
    del axis_name
    size = _size(preset, num_layers, width, num_heads, context)
    if attention not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention={attention!r}; possible are {', '.join(IMPLEMENTATIONS)}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout}; possible is 0 or more, and below 1")

    def forward(
        inputs: jax.Array | dict[str, jax.Array],
        is_training: bool,
        cache: Cache | Literal["new"] | None = None,
    ) -> LazyLogits | tuple[LazyLogits, Cache]:
        rate, after = dropout if is_training else 0.0, []
        packed = isinstance(inputs, dict)
        if packed and cache is not None:
            raise ValueError("packed examples have no KV cache; give tokens alone")
        tokens, segments = (inputs[k] for k in NAMES) if packed else (inputs, None)
        if packed:  # One number may come back.
            segments = jnp.cumsum(_begins(segments), axis=1)
        block = functools.partial(_block, size, rate, attention)
        block = hk.remat(block) if remat else block
        with hk.name_scope("gpt"):
            x, vocabulary, cache = _embed(tokens, segments, num_outputs, size, cache)
            x = layers.drop(rate, x)  # [B, T, D]
            for i in range(size.num_layers):
                before = None if cache is None else (cache.blocks[i], cache.lengths)
                with hk.name_scope(f"block_{i}"):
                    x, new = block(x, segments, before)
                after.append(new)
            logits = LazyLogits(layers.norm("norm")(x), vocabulary)
        if cache is None:
            return logits
        return logits, Cache(tuple(after), cache.lengths + tokens.shape[1])

    return hk.transform(forward)


def _embed(
    tokens: jax.Array,
    segments: jax.Array | None,
    num_outputs: int,
    size: Size,
    cache: Cache | str | None,
) -> tuple[jax.Array, jax.Array, Cache | None]:
    """Embeddings of the tokens [B, T, D], the vocabulary [V, D], and a KV cache."""
    rows, num_tokens = tokens.shape
    if num_tokens > size.context:
        raise ConfigError(
            f"the model sees {size.context} tokens at once and was given {num_tokens}; "
            f"give it fewer, with config.data.context={size.context}, or a longer "
            "config.model.context"
        )
    vocabulary = layers.table(num_outputs, size.width, "embed")
    positions = layers.table(size.context, size.width, "positions")
    if cache == "new":
        shape = (rows, size.context, size.num_heads, size.width // size.num_heads)
        zeros = jnp.zeros(shape, vocabulary.dtype)
        cache = Cache(((zeros, zeros),) * size.num_layers, jnp.zeros(rows, jnp.int32))
    x = layers.look_up(vocabulary, tokens)
    if cache is None and segments is None:
        return x + layers.repeat(positions[:num_tokens], rows), vocabulary, None
    places = jnp.arange(num_tokens)
    if segments is not None:
        first = jnp.where(_begins(segments), places, 0)
        places -= jax.lax.cummax(first, axis=1)  # They begin anew: [B, T].
    else:
        places = cache.lengths[:, None] + places  # [B, T]
    return x + layers.look_up(positions, places), vocabulary, cache


def _begins(segments: jax.Array) -> jax.Array:
    """Finds where the numbers change: bool [B, T]."""
    return jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0


def _block(
    size: Size,
    rate: float,
    attention: str,
    x: jax.Array,
    segments: jax.Array | None,
    cache: tuple[KeysValues, jax.Array] | None,
) -> tuple[jax.Array, KeysValues | None]:
    """Attention and an MLP with residuals: [B, T, D]; appends to a given KV cache."""
    # The more layers, the smaller the initial residuals.
    deviation = layers.DEVIATION / (2 * size.num_layers) ** 0.5
    residual = hk.initializers.RandomNormal(deviation)
    heads = (*x.shape[:2], size.num_heads, size.width // size.num_heads)
    y = layers.norm("norm_1")(x)
    with hk.name_scope("attention"):
        projected = jnp.split(layers.linear(3 * size.width, "qkv")(y), 3, axis=-1)
        query, key, value = (p.reshape(heads) for p in projected)
        if cache is None:
            # First parameters come from shapes alone, and are traced in float32.
            kernel = "xla" if hk.running_init() else attention
            y = attend(kernel, query, key, value, segments=segments)
        else:
            (keys, values), lengths = cache
            keys, values = _append(keys, key, lengths), _append(values, value, lengths)
            cache = keys, values
            here = lengths[:, None] + jnp.arange(x.shape[1])  # [B, T]
            visible = jnp.arange(size.context) <= here[:, None, :, None]
            y = attend(attention, query, keys, values, visible)
        y = layers.linear(size.width, "projection", residual)(y.reshape(x.shape))
    x = x + layers.drop(rate, y)
    y = layers.feed_forward(layers.norm("norm_2")(x), 4 * size.width, True, residual)
    return x + layers.drop(rate, y), cache


def _append(cache: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Writes [B, T, H, D / H] behind the first `lengths` of [B, S, H, D / H]."""
    write = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
    return write(cache, new.astype(cache.dtype), lengths, 0)


def gpt_flops_per_token(
    num_outputs: int,
    num_tokens: int | None = None,
    *,
    trained: dict[str, int] | None = None,
    added: dict[str, int] | None = None,
    **model: Any,
) -> float:
    """Floating-point operations of one training step, for each token, for MFU.

    6 N + 12 L D T (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): forward and
    backward, N the parameters without those of the positions, L layers. Recomputation
    (remat) does not count, and attention counts as if it were not causal.

    With frozen parameters, the backward pass ends at the first block with a trainable
    one. Each parameter then costs 2 operations forward, 2 in the backward pass through
    it, and, if trainable, 2 for its gradient.

    Args:
      num_tokens: T; None means the context.
      trained: size of each trainable parameter, by path; None means all are trainable.
      added: the same of adapters, which N does not count.
      **model: the keys of `config.model`.
    """
    size = _size(*map(model.get, ("preset", *Size._fields)))
    width = size.width
    block = 12 * width**2 + 13 * width  # Four matrices, their biases, two norms.
    params = num_outputs * width + size.num_layers * block + 2 * width
    attention = width * (num_tokens or size.context)
    if trained is None:
        return 6.0 * params + 12.0 * size.num_layers * attention
    added = added or {}
    flops = 2.0 * params + 4.0 * size.num_layers * attention + 4.0 * sum(added.values())
    learning = {k: n for k, n in (trained | added).items() if "/positions/" not in k}
    if not learning:
        return flops
    below = min(_depth(path, size.num_layers) for path in learning)
    through = 2.0 * (params - below * block)
    through += 8.0 * (size.num_layers - below) * attention
    return flops + through + 2.0 * sum(learning.values())


def _depth(path: str, num_layers: int) -> int:
    """Number of blocks below a parameter."""
    block = re.search(r"/block_(\d+)/", path)
    return int(block[1]) if block else num_layers * ("/norm/" in path)


def complete_sizes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Completes keyword arguments of `gpt`: None or absent ones from the preset."""
    size = _size(*map(arguments.get, ("preset", *Size._fields)))
    return {"dropout": 0.0} | arguments | size._asdict()


def _size(preset: str | None, *sizes: int | None) -> Size:
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset={preset!r}; possible are {', '.join(PRESETS)}")
    pairs = zip(sizes, PRESETS[preset or "124M"], strict=True)
    size = Size(*(default if x is None else x for x, default in pairs))
    if min(size) < 1 or size.width % size.num_heads:
        raise ValueError(
            f"num_layers={size.num_layers}, width={size.width}, num_heads="
            f"{size.num_heads} and context={size.context} are not all possible: each "
            "is 1 or more, and width a multiple of num_heads"
        )
    return size


gpt.family = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    keywords=(
        Keyword("num_outputs", "vocab_size", 50257),
        Keyword("context", "n_positions", 1024),
        Keyword("width", "n_embd", 768),
        Keyword("num_layers", "n_layer", 12),
        Keyword("num_heads", "n_head", 12),
        Keyword("dropout", "resid_pdrop", 0.1),
    ),
    fixed=lambda config: {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "n_inner": (None, 4 * config.get("n_embd", 768)),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    # The causal mask of old files is skipped; it is computed here.
    rules=layer_rules("""
        embedding  [transformer.]wte                 gpt/embed
        embedding  lm_head                           gpt/embed
        embedding  [transformer.]wpe                 gpt/positions
        norm       [transformer.]h.{}.ln_1           gpt/block_{}/norm_1
        conv1d     [transformer.]h.{}.attn.c_attn    gpt/block_{}/attention/qkv
        conv1d     [transformer.]h.{}.attn.c_proj    gpt/block_{}/attention/projection
        norm       [transformer.]h.{}.ln_2           gpt/block_{}/norm_2
        conv1d     [transformer.]h.{}.mlp.c_fc       gpt/block_{}/mlp/up
        conv1d     [transformer.]h.{}.mlp.c_proj     gpt/block_{}/mlp/down
        norm       [transformer.]ln_f                gpt/norm
        skip       [transformer.]h.{}.attn.bias
        skip       [transformer.]h.{}.attn.masked_bias
    """),
    sizes=complete_sizes,
    flops_per_token=gpt_flops_per_token,
    tables=("gpt/embed/embeddings", "gpt/positions/embeddings"),
)
