"""Files on disk -> named tensors: safetensors folders and GGUF files behind one interface. No torch, pickle or remote code."""
