"""A patch becomes a model that others can run: each format is written, reloaded and compared before it counts."""
