"""Ways to extend a model's context. Each is a function of a model and a Job, and yields a Patch."""
