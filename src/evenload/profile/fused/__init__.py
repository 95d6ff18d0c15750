"""Operator graphs of Megatron-Core blocks with Transformer Engine: fused norms, RoPE, SwiGLU, attention and loss.

No traces pin these rules: they are read from the sources named at each (Megatron-LM and Transformer Engine, state
of 2025), and hold without dropout. Modules have Hugging Face names, as everywhere; `qkv_proj` and `gate_up_proj` are
Megatron's `linear_qkv` and `linear_fc1`.
"""
