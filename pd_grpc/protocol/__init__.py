"""What both ends of the conversation share; no engine, no torch."""
