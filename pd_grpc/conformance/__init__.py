"""The judge: numbered cases that drive an implementation of pd_grpc.v1 over gRPC alone.

A case quotes the rule it tests, word for word from the protocol's reference, and knows the subject
only by its endpoint: what the subject is written in, and by whom, makes no difference.
"""
