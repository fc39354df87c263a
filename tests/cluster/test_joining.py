import pytest

from haiku_template.cluster import joining
from haiku_template.errors import ConfigError

GONE = "UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:1968"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_words_of_jax_about_a_lost_process_are_a_sentence(monkeypatch, kind):
    assert joining.lost(kind(GONE)) is None  # On its own, a defect.
    monkeypatch.setattr(joining, "is_joined", lambda: True)
    assert "is gone or cannot be reached (UNKNOWN: Gloo" in str(
        joining.lost(kind(GONE))
    )


@pytest.mark.parametrize("error", [ValueError("x"), ConfigError(GONE), KeyError(GONE)])
def test_other_errors_stay_what_they_are(monkeypatch, error):
    monkeypatch.setattr(joining, "is_joined", lambda: True)
    assert joining.lost(error) is None
