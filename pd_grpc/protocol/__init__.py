"""What both ends of the conversation share: refs, layouts, statuses, deadlines. No engine, no torch."""
