"""Writes random checkpoints small enough for a test, and the tokenizer that goes with them, so the whole engine runs on a CPU."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCAB_SIZE = 261
END_ID = 257


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token (ids 0 to 255), then the special ones: any text can be said, and characters span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def tiny_llama(**changes) -> PreTrainedModel:
    """``tiny_model`` of the llama family."""
    return tiny_model("llama", **changes)


def tiny_model(family: str, **changes) -> PreTrainedModel:
    """A random two-layer model in float32, in transformers' own class: the oracle. Weights are large enough to matter."""
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": END_ID,
        "initializer_range": 0.15,
    }
    if family == "mistral":
        values["sliding_window"] = None
    elif family == "qwen3_moe":
        values |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    elif family == "mixtral":
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **{**values, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def expected_logits(oracle, ids):
    """What the oracle says of one sequence: [len(ids), vocab_size]."""
    with torch.no_grad():
        return oracle(torch.tensor([ids])).logits[0]


def save_checkpoint(model: PreTrainedModel, folder: Path, *, tokenizer: bool = True, max_shard_size: str = "5GB") -> Path:
    """Save as transformers does, with tokenizer and chat template beside it."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        config = {"chat_template": CHAT_TEMPLATE, "bos_token": "<|bos|>", "eos_token": "<|end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def edit_json(file: Path, **changes) -> None:
    """Change keys of a JSON file; a value of ``...`` removes the key."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
