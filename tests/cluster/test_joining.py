import pytest

from haiku_template.cluster import joining
from haiku_template.errors import ConfigError
from haiku_template.runs import stopping

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


@pytest.mark.parametrize(
    "words",
    [
        "INTERNAL: NCCL operation ncclCommInitRankConfig failed: unhandled cuda error",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error",
        "INTERNAL: Gloo AllReduce failed: [enforce fail] no space left on /dev/shm",
    ],
)
def test_an_error_of_the_collectives_themselves_is_no_lost_process(monkeypatch, words):
    monkeypatch.setattr(joining, "is_joined", lambda: True)
    error = joining.lost(RuntimeError(words))
    assert str(error).startswith("the collectives failed here, and no process is lost")
    assert words in str(error) and error.exit_code == 64


def test_jax_aborts_no_last_save_of_a_terabyte():
    """With 8 s, and a last save of 40, both processes of a run ended in its abort."""
    assert joining.PATIENCE_SECONDS * stopping.WRITTEN_BYTES > 1e12
