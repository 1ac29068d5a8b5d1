"""The wings composed: what a user asks for in one command."""
