"""The three servers: each reads its configuration, builds what it needs, and serves."""
