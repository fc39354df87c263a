"""Residual networks for small images (He et al. 2015, arXiv:1512.03385, section 4.2).

Shapes: B images, H x W pixels, C channels, K outputs.
"""

from collections.abc import Sequence

import haiku as hk
import jax
import jax.numpy as jnp


def resnet(
    num_outputs: int,
    axis_name: str | None = None,
    *,
    channels: Sequence[int] = (16, 32, 64),
    blocks: int = 3,
    norm_decay: float = 0.9,
) -> hk.TransformedWithState:
    """A ResNet with a 3 x 3 stem and no pooling after it: [B, H, W, C] to [B, K].

    Batch statistics are those of the whole batch, averaged over `axis_name`; their
    moving averages are the network state.

    Args:
      axis_name: mesh axis of the devices; None on one device.
      channels: of each group; each group after the first halves H and W.
      blocks: residual blocks in each group, of two convolutions each.
      norm_decay: decay of the moving averages, for each step.
    """
    sizes = [*channels, blocks] if isinstance(channels, Sequence) and channels else [0]
    are_sizes = all(isinstance(size, int) and size >= 1 for size in sizes)
    if not are_sizes or not 0 <= norm_decay < 1:
        raise ValueError(
            f"channels={channels}, blocks={blocks} and norm_decay={norm_decay} are not "
            "all possible: channels are one or more numbers, each as blocks 1 or more, "
            "such as (16, 32), norm_decay is in [0, 1)"
        )
    norm = {"create_scale": True, "create_offset": True, "decay_rate": norm_decay}
    norm["cross_replica_axis"] = axis_name

    def forward(inputs: jax.Array, is_training: bool) -> jax.Array:
        x = hk.Conv2D(channels[0], 3, with_bias=False, name="stem")(inputs)
        stem_norm = hk.BatchNorm(
            create_scale=True,
            create_offset=True,
            decay_rate=norm_decay,
            cross_replica_axis=axis_name,
            name="stem_norm",
        )
        x = jax.nn.relu(stem_norm(x, is_training))
        for i, width in enumerate(channels):
            x = hk.nets.ResNet.BlockGroup(
                channels=width,
                num_blocks=blocks,
                stride=1 if i == 0 else 2,
                bn_config=norm,
                resnet_v2=False,
                bottleneck=False,
                use_projection=i > 0,
                name=f"group_{i}",
            )(x, is_training, test_local_stats=False)
        return hk.Linear(num_outputs, name="head")(jnp.mean(x, axis=(1, 2)))

    return hk.transform_with_state(forward)
