"""Long runs over real processes that are killed, stopped, cut off and lied to meanwhile."""
