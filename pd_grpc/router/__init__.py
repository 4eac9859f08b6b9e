"""Takes clients' requests, pairs a prefill with a decode instance, and streams the answer."""
