"""Moving KV bytes from P's pool to D's. `base` is what every transport implements."""
