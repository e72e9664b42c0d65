"""Copies between the paged KV cache and chunks, on CPU and CUDA."""
