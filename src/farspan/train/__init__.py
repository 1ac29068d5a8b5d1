"""One loop for everything that learns: models, scales, and the laboratory's fleets."""
