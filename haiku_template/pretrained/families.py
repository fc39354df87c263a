"""Model families in Hugging Face's layout: their config.json and tensors, as data."""

from collections.abc import Callable
from typing import Any, NamedTuple

from haiku_template.pretrained.rules import Rule


class Keyword(NamedTuple):
    """A keyword argument of the model, and its key in config.json.

    Attributes:
      name: the keyword.
      key: in config.json.
      default: where config.json has no such key; its type is the one to expect.
    """

    name: str
    key: str
    default: int | float


class Family(NamedTuple):
    """Models of one kind.

    Attributes:
      model: their name in `MODELS`.
      architectures: Hugging Face's classes whose tensors the rules know.
      keywords: what config.json says of a model's size.
      fixed: what config.json must say for the model to be the one computed here: for
        each key what is possible, first of all the default.
      rules: the rename table.
    """

    model: str
    architectures: tuple[str, ...]
    keywords: tuple[Keyword, ...]
    fixed: Callable[[dict[str, Any]], dict[str, tuple[Any, ...]]]
    rules: tuple[Rule, ...]


def _linear(pattern: str, target: str, optional: bool = False) -> tuple[Rule, ...]:
    """PyTorch's `nn.Linear`, whose weight is (out, in)."""
    return (
        Rule(f"{pattern}.weight", f"{target}/w", "transpose", optional),
        Rule(f"{pattern}.bias", f"{target}/b", "same", optional),
    )


def _conv1d(pattern: str, target: str) -> tuple[Rule, ...]:
    """Hugging Face's `Conv1D`, whose weight is (in, out) as Haiku's is."""
    return (
        Rule(f"{pattern}.weight", f"{target}/w"),
        Rule(f"{pattern}.bias", f"{target}/b"),
    )


def _norm(pattern: str, target: str) -> tuple[Rule, ...]:
    """`nn.LayerNorm`; files that came from TensorFlow say gamma and beta."""
    return (
        Rule(f"{pattern}.weight", f"{target}/scale"),
        Rule(f"{pattern}.bias", f"{target}/offset"),
        Rule(f"{pattern}.gamma", f"{target}/scale"),
        Rule(f"{pattern}.beta", f"{target}/offset"),
    )


_GPT2 = "[transformer.]h.{}."
_GPT = "gpt/block_{}/"
GPT2 = Family(
    model="gpt",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    keywords=(
        Keyword("num_outputs", "vocab_size", 50257),
        Keyword("context", "n_positions", 1024),
        Keyword("width", "n_embd", 768),
        Keyword("num_layers", "n_layer", 12),
        Keyword("num_heads", "n_head", 12),
        Keyword("dropout", "resid_pdrop", 0.1),
    ),
    fixed=lambda config: {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "n_inner": (None, 4 * config.get("n_embd", 768)),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    rules=(
        Rule("[transformer.]wte.weight", "gpt/embed/embeddings"),
        Rule("lm_head.weight", "gpt/embed/embeddings"),
        Rule("[transformer.]wpe.weight", "gpt/positions/embeddings"),
        *_norm(f"{_GPT2}ln_1", f"{_GPT}norm_1"),
        *_conv1d(f"{_GPT2}attn.c_attn", f"{_GPT}attention/qkv"),
        *_conv1d(f"{_GPT2}attn.c_proj", f"{_GPT}attention/projection"),
        *_norm(f"{_GPT2}ln_2", f"{_GPT}norm_2"),
        *_conv1d(f"{_GPT2}mlp.c_fc", f"{_GPT}mlp/up"),
        *_conv1d(f"{_GPT2}mlp.c_proj", f"{_GPT}mlp/down"),
        *_norm("[transformer.]ln_f", "gpt/norm"),
        Rule(f"{_GPT2}attn.bias", None),  # The causal mask, which is computed here.
        Rule(f"{_GPT2}attn.masked_bias", None),
    ),
)

_LAYER = "[bert.]encoder.layer.{}."
_BLOCK = "bert/block_{}/"
BERT = Family(
    model="bert",
    architectures=(
        "BertModel",
        "BertForSequenceClassification",
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForNextSentencePrediction",
    ),
    keywords=(
        Keyword("vocab_size", "vocab_size", 30522),
        Keyword("context", "max_position_embeddings", 512),
        Keyword("width", "hidden_size", 768),
        Keyword("num_layers", "num_hidden_layers", 12),
        Keyword("num_heads", "num_attention_heads", 12),
        Keyword("mlp_width", "intermediate_size", 3072),
        Keyword("token_types", "type_vocab_size", 2),
        Keyword("dropout", "hidden_dropout_prob", 0.1),
        Keyword("norm_eps", "layer_norm_eps", 1e-12),
    ),
    fixed=lambda config: {
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    rules=(
        Rule("[bert.]embeddings.word_embeddings.weight", "bert/embed/embeddings"),
        Rule(
            "[bert.]embeddings.position_embeddings.weight", "bert/positions/embeddings"
        ),
        Rule(
            "[bert.]embeddings.token_type_embeddings.weight",
            "bert/token_types/embeddings",
        ),
        *_norm("[bert.]embeddings.LayerNorm", "bert/norm"),
        *_linear(f"{_LAYER}attention.self.query", f"{_BLOCK}attention/query"),
        *_linear(f"{_LAYER}attention.self.key", f"{_BLOCK}attention/key"),
        *_linear(f"{_LAYER}attention.self.value", f"{_BLOCK}attention/value"),
        *_linear(f"{_LAYER}attention.output.dense", f"{_BLOCK}attention/projection"),
        *_norm(f"{_LAYER}attention.output.LayerNorm", f"{_BLOCK}norm_1"),
        *_linear(f"{_LAYER}intermediate.dense", f"{_BLOCK}mlp/up"),
        *_linear(f"{_LAYER}output.dense", f"{_BLOCK}mlp/down"),
        *_norm(f"{_LAYER}output.LayerNorm", f"{_BLOCK}norm_2"),
        *_linear("[bert.]pooler.dense", "bert/pooler", optional=True),
        *_linear("classifier", "bert/head", optional=True),
        Rule("[bert.]embeddings.position_ids", None),  # 0, 1, 2 and so on.
        Rule("cls.*", None),  # The heads of pretraining.
    ),
)

FAMILIES: dict[str, Family] = {"gpt2": GPT2, "bert": BERT}
