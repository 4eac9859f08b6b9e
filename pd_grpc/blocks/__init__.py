"""Who holds which block of a KV pool. Pure Python: no gRPC, no torch, no bytes."""
