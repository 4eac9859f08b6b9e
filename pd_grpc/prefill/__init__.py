"""The prefill side: reads prompts, fills KV caches and hands requests over to decode instances."""
