"""The wire protocol: code generated from `protos/pd_grpc/v1/` by `make protos`; never edited."""
