"""pd-grpc: the conversation between prefill and decode as a typed protocol over gRPC."""
