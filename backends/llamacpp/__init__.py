"""KV states by libllama, kept in sequences of one cache and joined to prompts without a copy."""
