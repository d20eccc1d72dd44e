"""Small random models for tests: real architecture, real tokenizer, no training, no download."""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = 256


def tiny_qwen3(path: Path | str, tied: bool = False, seed: int = 0, vocab_size: int = 320) -> Path:
    """Write a random fp32 Qwen3 of about 0.7 M parameters and a byte-level tokenizer with a chat template to ``path``.

    Args:
        tied: one matrix for embeddings and output head.
        vocab_size: rows of the embedding, at least 256 bytes + the special tokens; ids past the tokenizer's own are
            never produced by it, but a random model samples them.

    Returns:
        ``path``, as a folder that ``transformers`` and vLLM load.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = Path(path)
    tokenizer = byte_tokenizer()
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size {vocab_size} is below the tokenizer's {len(tokenizer)} tokens")
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Far above the usual 0.02, so that the distributions of two seeds differ clearly.
        initializer_range=0.08,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def perturbed_weights(path: Path | str, seed: int, scale: float = 0.03):
    """The named tensors of the model at ``path`` with seeded noise on each: what an optimiser step could publish."""
    import torch
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    weights = load_file(Path(path) / "model.safetensors")
    return {name: w + scale * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def reference_logprobs(path: Path | str, prompt: list[int], sampled: list[int], temperature=1.0, weights=None):
    """Log-probabilities that ``transformers`` gives ``sampled`` after ``prompt`` in fp32: float32 [sampled].

    Args:
        weights: named tensors to use instead of those at ``path``.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    if weights is not None:
        unknown = model.load_state_dict(weights, strict=False).unexpected_keys
        assert not unknown, unknown
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]


def byte_tokenizer():
    """A fast tokenizer with one token per byte, then the special tokens. Ends turns with ``<|im_end|>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == BYTES + len(SPECIAL_TOKENS)
    return tokenizer
