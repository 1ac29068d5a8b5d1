"""Why a model fails beyond its train length: curves by position, their knees and a verdict."""
