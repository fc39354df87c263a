"""How a token is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_text.generation import Sampling, sample

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=11).astype(np.float32) * 2
ROWS = 8_000


def draw(count=0, **options):
    """A token for each of many rows with the same logits."""
    logits = jnp.broadcast_to(LOGITS, (ROWS, len(LOGITS)))
    counts = jnp.full(ROWS, count)
    choose = jax.jit(lambda *args: sample(*args, Sampling(**options)))
    return np.asarray(choose(logits, counts))


def shares(tokens):
    return np.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_as_frequent_as_the_temperature_says(temperature):
    # A share's standard deviation is at most 0.0056.
    expected = softmax(LOGITS / temperature)
    np.testing.assert_allclose(
        shares(draw(temperature=temperature)), expected, atol=0.025
    )


@pytest.mark.parametrize("top_k", [1, 3, 11])
def test_only_the_likeliest_are_chosen_as_often_as_among_themselves(top_k):
    kept = np.argsort(LOGITS)[-top_k:]
    expected = np.zeros_like(LOGITS)
    expected[kept] = softmax(LOGITS[kept] / 1.5)
    found = shares(draw(temperature=1.5, top_k=top_k))
    np.testing.assert_allclose(found, expected, atol=0.025)
    assert np.all(found[np.argsort(LOGITS)[:-top_k]] == 0)


def test_temperature_zero_takes_the_likeliest():
    tokens = draw(temperature=0.0, seed=5)
    assert tokens.dtype == np.int32
    assert np.all(tokens == LOGITS.argmax())


def test_tokens_outside_the_vocabulary_are_not_chosen():
    for temperature in (0.0, 3.0):
        tokens = draw(temperature=temperature, vocabulary=4)
        assert np.all(tokens < 4)
    assert set(tokens) == {0, 1, 2, 3}


def test_the_choice_is_one_of_seed_row_and_count():
    first = draw()
    np.testing.assert_array_equal(first, draw())
    for other in (draw(seed=1), draw(count=1)):
        # Independent draws agree as often as two draws of the same distribution do.
        expected = np.sum(softmax(LOGITS) ** 2)
        assert np.mean(first == other) == pytest.approx(expected, abs=0.03)
    assert len(set(first[:50])) > 1
