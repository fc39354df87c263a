"""Multi-layer perceptron."""

import haiku as hk
import jax


def mlp(
    num_outputs: int,
    axis_name: str | None = None,
    *,
    width: int = 128,
    num_layers: int = 2,
    dropout: float = 0.0,
) -> hk.Transformed:
    """An MLP over flattened inputs: B examples to [B, num_outputs].

    Args:
      width: units of each of the hidden layers.
      num_layers: hidden layers, 0 or more.
      dropout: share of hidden units dropped in training, in [0, 1).
    """
    del axis_name  # It keeps no statistics of the batch.
    if not (width >= 1 and num_layers >= 0 and 0 <= dropout < 1):
        raise ValueError(
            f"width={width}, num_layers={num_layers} and dropout={dropout} are not all "
            "possible: width is 1 or more, num_layers 0 or more, dropout in [0, 1)"
        )

    def forward(inputs: jax.Array, is_training: bool) -> jax.Array:
        net = hk.nets.MLP([width] * num_layers + [num_outputs])
        rate = dropout if is_training and dropout else None
        rng = hk.next_rng_key() if rate else None
        return net(hk.Flatten()(inputs), dropout_rate=rate, rng=rng)

    return hk.transform(forward)
