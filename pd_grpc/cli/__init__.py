"""The `pd-grpc` command."""
