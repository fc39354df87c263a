"""The task: loss and metrics of the model's outputs, example by example."""

import jax
import jax.numpy as jnp
import optax


def task(
    logits: jax.Array, batch: dict[str, jax.Array], *, smoothing: float
) -> dict[str, jax.Array]:
    """Cross-entropy in nats, and accuracy, of each example: float32 [B].

    Training minimizes the average of `loss`. All values are averaged and reported: of
    single batches as train/NAME, of the evaluation set as eval/NAME.

    `logits` are float32 [B, K]; `smoothing`, in [0, 1), is a key of `config.task`.
    """
    labels = batch["labels"]
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[1]), smoothing)
    correct = jnp.argmax(logits, axis=1) == labels
    return {
        "loss": optax.softmax_cross_entropy(logits, targets),
        "accuracy": correct.astype(jnp.float32),
    }
