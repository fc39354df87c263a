"""config.json: what is not the model computed here is refused in one sentence."""

import json

import pytest

from haiku_template.errors import ConfigError
from haiku_text.huggingface import describe
from haiku_text.models import gpt


def test_a_gpt2_folder_is_described(references):
    found = describe(references / "gpt2", gpt.family)
    assert found.family is gpt.family
    assert found.arguments == {
        "num_outputs": 48,
        "context": 16,
        "width": 32,
        "num_layers": 2,
        "num_heads": 4,
        "dropout": 0.1,
    }


def test_what_config_json_leaves_out_has_hugging_faces_default(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    arguments = describe(tmp_path).arguments
    assert (arguments["width"], arguments["norm_eps"]) == (768, 1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bert", {"model_type": "roberta"}, "type 'roberta'; possible are gpt2, bert"),
        ("bert", {"architectures": ["BertForQuestionAnswering"]}, "QuestionAnswering;"),
        ("bert", {"position_embedding_type": "relative_key"}, "possible is 'absolute'"),
        ("bert", {"hidden_act": "relu"}, "hidden_act='relu'.*possible is 'gelu'"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("bert", {"hidden_size": "32"}, "hidden_size='32'; a whole number is needed"),
        ("bert", {"hidden_size": True}, "hidden_size=True; a whole number"),
        ("bert", {"layer_norm_eps": None}, "layer_norm_eps=None; a number is needed"),
        ("gpt2", {"activation_function": "relu"}, "possible is 'gelu_new' or"),
        (
            "gpt2",
            {"n_embd": None},
            "n_embd=None; a whole number is needed, such as 768",
        ),
        ("gpt2", {"n_inner": 64}, "n_inner=64.*possible is None or 128"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
    ],
)
def test_another_model_is_refused(copy_of, name, changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        describe(copy_of(name, **changes))
    assert error.value.exit_code == 64


def test_a_model_of_another_kind_than_wanted_is_refused(references):
    with pytest.raises(ConfigError, match="'bert'; possible are gpt2 for this model"):
        describe(references / "bert", gpt.family)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"model_type": []}'])
def test_a_damaged_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json is damaged"):
        describe(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="config.json does not exist"):
        describe(tmp_path)


def test_references_are_as_transformers_wrote_them(references):
    """A changed config would make the other tests compare with something else."""
    versions = {
        json.loads(path.read_text())["transformers_version"]
        for path in references.glob("*/config.json")
    }
    assert versions == {"5.23.0"}
