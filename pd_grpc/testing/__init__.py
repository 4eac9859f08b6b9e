"""Tools to try an instance, or what embeds one, under every fault."""
