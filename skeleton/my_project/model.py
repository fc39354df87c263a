"""The model: a small pre-activation ResNet; replace `forward` with yours.

Shapes: B examples, H x W pixels, C channels, K outputs.
"""

import haiku as hk
import jax


def model(
    num_outputs: int, axis_name: str | None, *, width: int, num_blocks: int
) -> hk.TransformedWithState:
    """Images [B, H, W, C] to logits [B, K].

    Args:
      num_outputs: K, the number of classes in the data.
      axis_name: of the devices, None on one. A layer that averages over the batch
        averages over this axis, too, or four devices would not equal one.
      width: channels of each block; a key of `config.model`, as all that follow.
      num_blocks: residual blocks.
    """

    def forward(images: jax.Array, is_training: bool) -> jax.Array:
        def activate(x: jax.Array) -> jax.Array:
            norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis_name)
            return jax.nn.relu(norm(x, is_training))

        x = hk.Conv2D(width, 3)(images)
        for _ in range(num_blocks):
            y = hk.Conv2D(width, 3, with_bias=False)(activate(x))
            x += hk.Conv2D(width, 3)(activate(y))
        return hk.Linear(num_outputs)(activate(x).mean(axis=(1, 2)))

    return hk.transform_with_state(forward)  # hk.transform for a model without state.
