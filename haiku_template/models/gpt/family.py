"""GPT-2 in Hugging Face's layout."""

from haiku_template.models.family import Family, Keyword, Rule, conv1d_rules, norm_rules
from haiku_template.models.gpt.model import complete_sizes, gpt_flops_per_token

_LAYER = "[transformer.]h.{}."
_BLOCK = "gpt/block_{}/"
FAMILY = Family(
    model_type="gpt2",
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
        *norm_rules(f"{_LAYER}ln_1", f"{_BLOCK}norm_1"),
        *conv1d_rules(f"{_LAYER}attn.c_attn", f"{_BLOCK}attention/qkv"),
        *conv1d_rules(f"{_LAYER}attn.c_proj", f"{_BLOCK}attention/projection"),
        *norm_rules(f"{_LAYER}ln_2", f"{_BLOCK}norm_2"),
        *conv1d_rules(f"{_LAYER}mlp.c_fc", f"{_BLOCK}mlp/up"),
        *conv1d_rules(f"{_LAYER}mlp.c_proj", f"{_BLOCK}mlp/down"),
        *norm_rules("[transformer.]ln_f", "gpt/norm"),
        Rule(f"{_LAYER}attn.bias", None),  # The causal mask, which is computed here.
        Rule(f"{_LAYER}attn.masked_bias", None),
    ),
    sizes=complete_sizes,
    flops_per_token=gpt_flops_per_token,
    tables=("gpt/embed/embeddings", "gpt/positions/embeddings"),
)
