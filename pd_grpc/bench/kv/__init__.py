"""What moving KV costs, beside what moving bytes costs. `run` is the benchmark, `ways` what it
compares."""
