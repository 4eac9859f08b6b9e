"""The `pd-grpc` command."""

import os

# grpc's own lines about connections that close are for those who debug grpc; they would stand in
# the middle of an answer. Whoever wants them sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
