"""Methods that extend a model's context: each takes a model and a FitJob and returns a Patch."""
