"""Experiments on reuse: what the paper measured, and what others do. Run from a checkout: `python -m benchmarks`.

They fill sections of the report that `edge-pc bench` begins, so that its page shows them too.
"""
