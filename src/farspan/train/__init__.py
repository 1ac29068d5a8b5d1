"""One loop for everything that learns: models, scales, and the lab's fleets."""
