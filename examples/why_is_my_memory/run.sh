#!/bin/sh
export MS_ALLOC_CONF="enable_vmm:True"
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments=True
export MS_ALLOC_CONF="memory_tracker:True"
python train.py
