"""Operator graphs of eager PyTorch: the modules of Hugging Face transformers 5, operator by operator.

Every line of these builders is pinned by traces of the real modules (`tests/data/profile`, recorded by
`benchmarks/trace_blocks.py`). Parameters and activations have one type, but for products under autocast.
"""
