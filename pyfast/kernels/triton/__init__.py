"""Kernels in Triton for NVIDIA GPUs, one idea a file. Importing anything in here needs triton; see kernels/cuda.py."""
