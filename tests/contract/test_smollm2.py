"""The GGUF conversion against a model that was written as GGUF the way llama.cpp does it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from train.smollm2 import END_OF_TURN, convert

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", END_OF_TURN, "a", "b", "c", "Ġ", "ab", "Ċ"]


def original(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the two halves of a rotary pair side by side; Hugging Face keeps all first halves first."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    kinds = [gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in TOKENS]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    if not config.tie_word_embeddings:
        writer.add_tensor("output.weight", weights["lm_head.weight"])
    for layer in range(LAYERS):
        for ours, theirs in names.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = rotary_order(weight, HEADS if theirs == "attn_q" else KV_HEADS)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_folder_holds_the_very_model_that_the_file_holds(tmp_path, tied):
    model = original(tied)
    write_gguf(model, tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "out", "float32")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == torch.float32 and loaded.config.tie_word_embeddings is tied
    assert not hasattr(loaded.config, "quantization_config")
    ids = torch.tensor([[3, 4, 5, 7, 3, 8, 4]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)

    end = TOKENS.index(END_OF_TURN)
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == end
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == END_OF_TURN and tokenizer.chat_template == TEMPLATE
    text = tokenizer.apply_chat_template([{"role": "c", "content": "ab a"}], tokenize=False)
    assert text == "<|im_start|>c\nab a<|im_end|>\n"
    assert tokenizer(text).input_ids == [1, 5, 8, 7, 6, 3, 2, 8]


def test_bfloat16_is_stored_as_such(tmp_path):
    write_gguf(original(tied=True), tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "out", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
