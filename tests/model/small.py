"""One small configuration for every family and variant that changes shapes."""

COMMON = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
VARIANTS = {
    "llama": {"model_type": "llama"},
    "llama with biases and its own head width": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 10,
        "tie_word_embeddings": True,
    },
    "llama with as many key heads as heads": {"model_type": "llama", "num_key_value_heads": None},
    "mistral": {"model_type": "mistral", "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, sliding from layer 2": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "qwen3 without a head width": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", "head_dim": 16},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 16, "tie_word_embeddings": False},
    "phi3": {"model_type": "phi3"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 20},
    "qwen3_moe, every second layer": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "num_experts": 4,
        "head_dim": 10,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe with dense layers": {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 4, "mlp_only_layers": [0, 3]},
    "llama4_text": {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 44,
        "head_dim": 8,
        "interleave_moe_layer_step": 2,
        "attention_bias": True,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", **EXPERTS, **LATENT, "attention_bias": True, "mlp_bias": True},
    "deepseek_v2 without a query rank": {"model_type": "deepseek_v2", **EXPERTS, **LATENT, "q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3", **EXPERTS, **LATENT},
    "deepseek_v3 with biases, all layers sparse": {
        "model_type": "deepseek_v3",
        **EXPERTS,
        **LATENT,
        "attention_bias": True,
        "first_k_dense_replace": 0,
    },
}

SMALL = {name: COMMON | variant for name, variant in VARIANTS.items()}
