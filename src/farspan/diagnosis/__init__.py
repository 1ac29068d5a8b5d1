"""Why a model fails beyond its training length: curves by position, and where they leave their trend."""
