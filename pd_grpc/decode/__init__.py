"""The decode instance (D): takes KV in and generates from it."""
