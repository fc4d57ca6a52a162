"""KV states by ONNX Runtime, injected by mapping file pages into the arena."""
