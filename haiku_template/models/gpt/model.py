"""GPT-2 (Radford et al. 2019), with the names and shapes of its published parameters.

Pre-normalization, learned positions, tied embeddings. Each parameter is one of Hugging
Face's tensors in its shape: `gpt/block_0/attention/qkv` is `h.0.attn.c_attn`, and so
on.

Shapes: B examples, T tokens, D width, H heads, S tokens of the context, V vocabulary.
"""

import re
from typing import Any, Literal, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.errors import ConfigError
from haiku_template.models.attention import IMPLEMENTATIONS
from haiku_template.models.gpt import blocks
from haiku_template.models.layers import drop, look_up, norm, table
from haiku_template.models.logits import LazyLogits


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
    """KV cache: keys and values of the tokens so far, each computed once.

    Attributes:
      blocks: of each block, keys and values: two arrays [B, S, H, D / H].
      lengths: tokens held of each example: int32 [B]. Later entries are overwritten
        before they are read.
    """

    blocks: tuple[blocks.KeysValues, ...]
    lengths: jax.Array


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
    cache; the caller ensures that they fit. The model keeps no statistics of the batch,
    so `axis_name` is not used.

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
        tokens: jax.Array,
        is_training: bool,
        cache: Cache | Literal["new"] | None = None,
    ) -> LazyLogits | tuple[LazyLogits, Cache]:
        _check_length(tokens.shape[1], size.context)
        rate = dropout if is_training else 0.0
        with hk.name_scope("gpt"):
            x, vocabulary, cache = _embed(tokens, num_outputs, size, cache)
            x = drop(rate, x)  # [B, T, D]
            after = []
            for i in range(size.num_layers):
                block = blocks.Block(
                    size.num_heads, size.num_layers, rate, attention, name=f"block_{i}"
                )
                block = hk.remat(block) if remat else block
                before = () if cache is None else (cache.blocks[i], cache.lengths)
                x, new = block(x, *before)
                after.append(new)
            logits = LazyLogits(norm("norm")(x), vocabulary)
        if cache is None:
            return logits
        return logits, Cache(tuple(after), cache.lengths + tokens.shape[1])

    return hk.transform(forward)


def _check_length(num_tokens: int, context: int) -> None:
    if num_tokens > context:
        raise ConfigError(
            f"the model sees {context} tokens at once and was given {num_tokens}; give "
            f"it fewer, with config.data.context={context}, or a longer "
            "config.model.context"
        )


def _embed(
    tokens: jax.Array, num_outputs: int, size: Size, cache: Cache | str | None
) -> tuple[jax.Array, jax.Array, Cache | None]:
    """Embeddings of the tokens [B, T, D], the vocabulary [V, D], and a KV cache."""
    rows, num_tokens = tokens.shape
    vocabulary = table(num_outputs, size.width, "embed")
    positions = table(size.context, size.width, "positions")
    if cache == "new":
        shape = (rows, size.context, size.num_heads, size.width // size.num_heads)
        zeros = jnp.zeros(shape, vocabulary.dtype)
        empty = ((zeros, zeros),) * size.num_layers
        cache = Cache(empty, jnp.zeros(rows, jnp.int32))
    x = look_up(vocabulary, tokens)
    if cache is None:
        return x + positions[None, :num_tokens], vocabulary, None
    places = blocks.places(cache.lengths, num_tokens)
    return x + look_up(positions, places), vocabulary, cache


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
      num_outputs: V.
      num_tokens: T; None means the context.
      trained: size of each trainable parameter, by path; None means all are trainable.
      added: the same of adapters, which N does not count.
      **model: the keys of `config.model`.

    Raises:
      ValueError: a value out of its range.
    """
    names = ("preset", *Size._fields)
    size = _size(**{name: model.get(name) for name in names})
    width = size.width
    block = 12 * width**2 + 13 * width  # Four matrices, their biases, two norms.
    params = num_outputs * width + size.num_layers * block + 2 * width
    attention = width * (num_tokens or size.context)
    if trained is None:
        return 6.0 * params + 12.0 * size.num_layers * attention
    added = added or {}
    learning = [path for path in trained | added if "/positions/" not in path]
    first = min((_depth(path, size.num_layers) for path in learning), default=None)
    below = size.num_layers if first is None else first
    above = size.num_layers - below
    forward = 2.0 * params + 4.0 * size.num_layers * attention
    through = 0.0
    if first is not None:
        through = 2.0 * (params - below * block) + 8.0 * above * attention
    weights = sum((trained | added)[path] for path in learning)
    return forward + through + 2.0 * weights + 4.0 * sum(added.values())


def _depth(path: str, num_layers: int) -> int:
    """Number of blocks below a parameter."""
    block = re.search(r"/block_(\d+)/", path)
    if block:
        return int(block[1])
    return num_layers if "/norm/" in path else 0


def complete_sizes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Completes keyword arguments of `gpt`: None or absent ones from the preset."""
    sizes = PRESETS[arguments.get("preset") or "124M"]._asdict()
    return sizes | {k: v for k, v in arguments.items() if v is not None}


def _size(preset: str | None, *args: int | None, **kwargs: int | None) -> Size:
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset={preset!r}; possible are {', '.join(PRESETS)}")
    given = dict(zip(Size._fields, args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if value is not None}
    size = PRESETS[preset or "124M"]._replace(**given)
    if min(size) < 1 or size.width % size.num_heads:
        raise ValueError(
            f"num_layers={size.num_layers}, width={size.width}, num_heads="
            f"{size.num_heads} and context={size.context} are not all possible: each "
            "is 1 or more, and width a multiple of num_heads"
        )
    return size
