"""Inference engines behind one contract, `base`: `sim` without a model, `torch` with one."""
