"""The task: what the model's outputs are worth, example by example."""

import jax
import jax.numpy as jnp
import optax


def task(
    logits: jax.Array, batch: dict[str, jax.Array], *, smoothing: float
) -> dict[str, jax.Array]:
    """Cross-entropy in nats, and accuracy, of each example: float32 [B].

    Training minimizes the average of `loss`; averages of all values are reported, of
    single batches as train/NAME and of the whole evaluation set as eval/NAME.

    Args:
      logits: the model's outputs, float32 [B, K].
      batch: `inputs` and `labels`, as `data.py` gives them.
      smoothing: of the labels, in [0, 1); a key of `config.task`.
    """
    labels = batch["labels"]
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[1]), smoothing)
    correct = jnp.argmax(logits, axis=1) == labels
    return {
        "loss": optax.softmax_cross_entropy(logits, targets),
        "accuracy": correct.astype(jnp.float32),
    }
