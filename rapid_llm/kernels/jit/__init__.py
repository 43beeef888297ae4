"""CUDA C++ for what Triton cannot say: sources, their compiler (NVRTC), the cache of binaries, their launch."""
