"""Runs a composed prompt: states are looked up or encoded, the rest is computed, tokens become an answer."""
