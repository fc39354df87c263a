"""BERT encoders in Hugging Face's layout."""

from haiku_template.models.family import Family, Keyword, Rule, linear_rules, norm_rules

_LAYER = "[bert.]encoder.layer.{}."
_BLOCK = "bert/block_{}/"
FAMILY = Family(
    model_type="bert",
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
        *norm_rules("[bert.]embeddings.LayerNorm", "bert/norm"),
        *linear_rules(f"{_LAYER}attention.self.query", f"{_BLOCK}attention/query"),
        *linear_rules(f"{_LAYER}attention.self.key", f"{_BLOCK}attention/key"),
        *linear_rules(f"{_LAYER}attention.self.value", f"{_BLOCK}attention/value"),
        *linear_rules(
            f"{_LAYER}attention.output.dense", f"{_BLOCK}attention/projection"
        ),
        *norm_rules(f"{_LAYER}attention.output.LayerNorm", f"{_BLOCK}norm_1"),
        *linear_rules(f"{_LAYER}intermediate.dense", f"{_BLOCK}mlp/up"),
        *linear_rules(f"{_LAYER}output.dense", f"{_BLOCK}mlp/down"),
        *norm_rules(f"{_LAYER}output.LayerNorm", f"{_BLOCK}norm_2"),
        *linear_rules("[bert.]pooler.dense", "bert/pooler", optional=True),
        *linear_rules("classifier", "bert/head", optional=True),
        Rule("[bert.]embeddings.position_ids", None),  # 0, 1, 2 and so on.
        Rule("cls.*", None),  # The heads of pretraining.
    ),
)
