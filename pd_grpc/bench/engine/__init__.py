"""The torch engine beside plain `transformers`: tokens a second of one process."""
