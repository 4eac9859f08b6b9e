"""Spans and logs. Used by every part of the package, and importing none of them."""
